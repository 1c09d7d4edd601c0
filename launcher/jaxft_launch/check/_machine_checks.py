"""What `jaxft doctor` checks on this machine alone."""

import importlib.util
import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from jaxft._base._host_memory import CGROUP, MEMINFO, available_bytes
from jaxft._exchange import _compiled
from jaxft._programs._environment import nondeterminism, xla_flags
from jaxft._version import __version__
from jaxft_launch.check._findings import Finding, fail, ok, warn

_PLUGIN = re.compile(r"(jax-(?:rocm|cuda)\d+)-(plugin|pjrt)")
# A group needs a descriptor for each peer and each joiner, and some dozens for itself.
FEW_DESCRIPTORS = 1024


def versions() -> Iterator[Finding]:
    """Check that what must have the same version has it."""
    found = {package.metadata["Name"].lower(): package.version for package in metadata.distributions()}
    yield from version_findings(found)


def version_findings(found: Mapping[str, str]) -> Iterator[Finding]:
    """Check versions, given by the name of each installed distribution."""
    yield ok(f"Python {sys.version.split()[0]}, jaxft {__version__}, jax {found.get('jax', 'missing')}")
    for name in ("jaxft-protocol", "jaxft-coordinator"):
        if name in found and found[name] != __version__:
            yield fail(
                f"{name} is {found[name]}, but jaxft is {__version__}",
                f"install the same version of both: pip install {name}=={__version__}",
            )
    jax = found.get("jax", "")
    if found.get("jaxlib", jax) != jax:
        yield fail(f"jaxlib is {found['jaxlib']}, but jax is {jax}", f"pip install jaxlib=={jax}")
    parts = {name: version for name, version in found.items() if _PLUGIN.fullmatch(name)}
    for name, version in parts.items():
        kind = name.rpartition("-")[0]
        other = f"{kind}-{'pjrt' if name.endswith('plugin') else 'plugin'}"
        if parts.get(other) != version and name.endswith("plugin"):
            yield fail(
                f"{name} is {version}, and {other} is {parts.get(other, 'missing')}: JAX will not find the device",
                f"pip install {other}=={version}",
            )
        elif _release(version) != _release(jax):
            yield fail(f"{name} is {version}, made for another jax than {jax}", f"pip install {name}=={jax}")


def _release(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:3])


def bytecode() -> Iterator[Finding]:
    """Check that a process which starts finds JAX compiled to bytecode, or leaves it for the next one."""
    spec = importlib.util.find_spec("jax")
    if spec is not None and spec.origin is not None:
        yield from bytecode_findings(Path(spec.origin), writes=not sys.dont_write_bytecode)


def bytecode_findings(module: Path, *, writes: bool) -> Iterator[Finding]:
    """Check it for a module of JAX, given its source.

    Args:
        module: its path.
        writes: whether Python writes bytecode.
    """
    kept = Path(importlib.util.cache_from_source(str(module)))
    folder = next(parent for parent in kept.parents if parent.exists())
    if kept.exists() or (writes and os.access(folder, os.W_OK)):
        return
    why = f"{folder} cannot be written to" if writes else "PYTHONDONTWRITEBYTECODE is set"
    yield warn(
        f"there is no bytecode of JAX, and Python keeps none ({why}): each process compiles all that it imports",
        "compile once, where the packages are installed, so that groups restart sooner: "
        f"`python -m compileall -q {module.parents[1]}`, or `uv pip install --compile-bytecode`",
    )


def devices(platform: str, count: int, flags: str) -> Iterator[Finding]:
    """Check whether the kernels of this platform give the same bits each time.

    Args:
        platform: as JAX names it.
        count: how many devices there are.
        flags: the value of XLA_FLAGS.
    """
    yield ok(f"{count} {platform} devices")
    if problem := nondeterminism(platform, xla_flags(flags)):
        yield warn(problem.partition(": set ")[0], "set" + problem.partition(": set")[2])


def lane() -> Iterator[Finding]:
    """Say what carries out exchanges here, without and with a token."""
    found = _compiled.library()
    if found is None:
        yield warn(
            "exchanges run in Python, without and with a token: the compiled lane was not built, or cannot be loaded",
            "install jaxft's wheel for Linux on x86_64 or aarch64, or a C compiler and then jaxft again: same bits, "
            "1.5 to 2.7 times less CPU time",
        )
    elif found.macs is None:
        yield ok(
            f"exchanges run in C ({found.instructions}); with a token, Python makes the MACs: this processor has no "
            "instructions for AES and carry-less products"
        )
    else:
        yield ok(f"exchanges run in C ({found.instructions}), with a token too (MACs: {found.macs})")


def limits() -> Iterator[Finding]:
    """Check how many descriptors a process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = float("inf") if hard == resource.RLIM_INFINITY else hard
    if most < FEW_DESCRIPTORS:
        yield warn(
            f"a process may open {hard} files and connections at most (limit nofile)",
            f"raise the hard limit to at least {FEW_DESCRIPTORS}: `ulimit -Hn`, LimitNOFILE= of systemd, or the "
            "container's setting",
        )
    else:
        yield ok(f"limit nofile: {soft} now, {hard} at most; jaxft raises it itself")


def memory(state_gb: float, meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> Iterator[Finding]:
    """Check whether the host, or the container, has room for one more state: a donor keeps a snapshot for a joiner.

    Args:
        state_gb: the size of this group's state on this host, in GB; 0: not known.
        meminfo: where the kernel tells of the host.
        cgroup: where it tells of the container.
    """
    free_bytes = available_bytes(meminfo, cgroup)
    if free_bytes is None:
        return
    free_gb = free_bytes / 1e9
    if not state_gb:
        yield ok(f"{free_gb:.1f} GB of host memory are available (--state-gb compares them with your state)")
    elif free_gb < state_gb:
        yield fail(
            f"{free_gb:.1f} GB of host memory are available, less than the {state_gb:g} GB of one more state",
            "a donor keeps a snapshot of its state for joiners: use hosts with more memory, or shard over more hosts",
        )
    else:
        yield ok(
            f"{free_gb:.1f} GB of host memory are available, enough for one more state of {state_gb:g} GB"
        )


def variables(given: Mapping[str, str]) -> Iterator[Finding]:
    """List the environment variables that jaxft reads; arguments are stronger than they are."""
    names = sorted(name for name in given if name.startswith("JAXFT_"))
    shown = ", ".join(f"{name}={'(set)' if name == 'JAXFT_TOKEN' else given[name]}" for name in names)
    yield ok(f"environment: {shown or 'no JAXFT_ variable is set'}")

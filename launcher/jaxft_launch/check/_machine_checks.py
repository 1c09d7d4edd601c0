"""What `jaxft doctor` checks on this machine alone."""

import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from jaxft._base._room import CGROUP, MEMINFO, available_bytes
from jaxft._exchange import _compiled
from jaxft._programs._environment import nondeterminism, xla_flags
from jaxft._version import __version__

_PLUGIN = re.compile(r"(jax-(?:rocm|cuda)\d+)-(plugin|pjrt)")
# A group needs a descriptor for each peer and each joiner, and some dozens for itself.
FEW_DESCRIPTORS = 1024


@dataclass(frozen=True, slots=True)
class Finding:
    """One result: whether it is fine, the facts, and a remedy if it is not."""

    level: Literal["ok", "warn", "fail"]
    text: str
    advice: str = ""


def ok(text: str) -> Finding:
    return Finding("ok", text)


def warn(text: str, advice: str) -> Finding:
    return Finding("warn", text, advice)


def fail(text: str, advice: str) -> Finding:
    return Finding("fail", text, advice)


def findings(*, state_gb: float) -> Iterator[Finding]:
    """Check this machine; this starts JAX's backend. `state_gb`: as for `memory`."""
    found = {package.metadata["Name"].lower(): package.version for package in metadata.distributions()}
    yield from versions(found)
    yield from _devices_here()
    yield lane()
    yield limits()
    yield from memory(state_gb)


def versions(found: Mapping[str, str]) -> Iterator[Finding]:
    """Check versions that must fit, given by the name of each installed distribution."""
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


def _devices_here() -> Iterator[Finding]:
    import jax

    try:
        found = jax.devices()
    except RuntimeError as error:
        yield fail(
            f"JAX cannot use its devices: {error}", "check the driver, and the versions of JAX's plug-ins"
        )
        return
    yield from devices_of(found[0].platform, len(found), os.environ.get("XLA_FLAGS", ""))


def devices_of(platform: str, count: int, flags: str) -> Iterator[Finding]:
    """Check whether the kernels of this platform (as JAX names it) give the same bits each time, with XLA_FLAGS."""
    yield ok(f"{count} {platform} devices")
    if problem := nondeterminism(platform, xla_flags(flags)):
        yield warn(problem.partition(": set ")[0], "set" + problem.partition(": set")[2])


def lane() -> Finding:
    """Tell what carries out exchanges here, without and with a token."""
    found = _compiled.library()
    if found is None:
        return warn(
            "exchanges run in Python, without and with a token: the compiled lane was not built, or cannot be loaded",
            "install jaxft's wheel for Linux on x86_64 or aarch64, or a C compiler and then jaxft again: same bits, "
            "1.5 to 2.7 times less CPU time",
        )
    if found.macs is None:
        return ok(
            f"exchanges run in C ({found.instructions}); with a token, Python makes the MACs: this processor has no "
            "instructions for AES and carry-less products"
        )
    return ok(f"exchanges run in C ({found.instructions}), with a token too (MACs: {found.macs})")


def limits() -> Finding:
    """Check how many descriptors a process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = float("inf") if hard == resource.RLIM_INFINITY else hard
    if most < FEW_DESCRIPTORS:
        return warn(
            f"a process may open {hard} files and connections at most (limit nofile)",
            f"raise the hard limit to at least {FEW_DESCRIPTORS}: `ulimit -Hn`, LimitNOFILE= of systemd, or the "
            "container's setting",
        )
    return ok(f"limit nofile: {soft} now, {hard} at most; jaxft raises it itself")


def memory(state_gb: float, meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> Iterator[Finding]:
    """Check whether the host, or the container, has room for one more state: a donor keeps a snapshot for a joiner.

    Args:
        state_gb: the size of this group's state on this host, in GB; 0: not known.
        meminfo: the kernel's file about the host.
        cgroup: its folder about the container.
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

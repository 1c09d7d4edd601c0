"""What changes the bits of a result without changing the program: flags, JAX's numeric settings, versions, drivers.

Compared between groups by name when a group joins. Flags that cannot change bits are left out, so that a single group
may write its dumps, for example. Values are compared as given: a flag set to its default differs from a missing flag,
because XLA does not publish its defaults.
"""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

# Options of JAX that change results; a version need not have all of them.
_JAX_OPTIONS = (
    "jax_enable_x64",
    "jax_explicit_x64_dtypes",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_threefry_gpu_kernel_lowering",
    "jax_random_seed_offset",
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_disable_jit",
    "jax_disable_most_optimizations",
    "jax_optimization_level",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_compiler_enable_remat_pass",
    "jax_use_shardy_partitioner",
    "jax_pallas_use_mosaic_gpu",
)
# Flags for output, timeouts, and the number of devices, which is compared separately.
_HARMLESS = re.compile(
    r"xla_dump_\w+|xla_\w*(timeout|log|profile|metrics|verbos)\w*|xla_force_host_platform_device_count"
    r"|xla_gpu_cuda_data_dir|xla_\w*compilation_parallelism"
)
# A coordinator accepts 200 settings from a group, of which 100 may be the user's.
_MOST_FLAGS = 32
# Of one setting a coordinator accepts 10,000 characters, and of all of them 64 KiB.
_LONGEST_VALUE = 2000
# Read by the libraries that XLA uses.
_VARIABLES = ("LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "MIOPEN_FIND_MODE")
# Files with the versions of an accelerator's drivers and libraries.
_VERSION_FILES = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version", "/opt/rocm/.info/version")
_PACKAGES = re.compile(r"libtpu|jax-\w+-(plugin|pjrt)|nvidia-(cudnn|cublas|cuda-runtime|nccl)-cu\d+")
_DETERMINISTIC = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")


def environment(devices: Sequence[Any], variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Everything besides the program that the bits of a result depend on, by name."""
    platform = devices[0].platform
    # XLA's CPU backend splits work by the number of usable cores, which changes the roundings.
    cores = str(len(os.sched_getaffinity(0))) if platform == "cpu" else "-"
    found = {
        "jax": f"{jax.__version__}/{metadata.version('jaxlib')}",
        "backend": platform,
        "cores": cores,
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        **_flag_settings(xla_flags(variables.get("XLA_FLAGS", ""))),
        **{name: variables[name] for name in _VARIABLES if variables.get(name)},
        **{name: str(getattr(jax.config, name)) for name in _JAX_OPTIONS if hasattr(jax.config, name)},
        **({} if platform == "cpu" else _accelerator(devices[0])),
    }
    return {name: _shortened(value) for name, value in found.items()}


def _shortened(value: str) -> str:
    """The value, or its beginning and a digest of all of it, if it is longer than a coordinator accepts."""
    if len(value) <= _LONGEST_VALUE:
        return value
    digest = hashlib.sha256(value.encode(errors="surrogateescape")).hexdigest()
    return f"{value[:_LONGEST_VALUE]}... (sha256 {digest})"


def xla_flags(text: str) -> dict[str, str]:
    """The flags of XLA that may change bits, by name. If a flag is given twice, the last one counts."""
    words = text.split()
    if words and not words[0].startswith("-"):
        file = Path(words[0])
        words = file.read_text(encoding="utf-8", errors="replace").split() if file.is_file() else []
    given = [word.lstrip("-").partition("=") for word in words if word.startswith("-")]
    flags = {name: value if equals else "true" for name, equals, value in given}
    return {name: flags[name] for name in sorted(flags) if not _HARMLESS.fullmatch(name)}


def nondeterminism(platform: str, flags: Mapping[str, str]) -> str | None:
    """A warning if kernels of this platform may give different bits from run to run; else None."""
    if platform not in ("gpu", "cuda", "rocm"):
        return None
    if any(flags.get(name, "false").lower() in ("true", "1") for name in _DETERMINISTIC):
        return None
    return (
        f"on {platform} some kernels (scatter, reductions, convolutions) may give different bits from run to run, so "
        "groups that compute the same shard may differ: set XLA_FLAGS=--xla_gpu_deterministic_ops=true in all "
        "groups, or --xla_gpu_exclude_nondeterministic_ops=true if they share autotuning results (docs/guarantees.md)"
    )


def _flag_settings(flags: Mapping[str, str]) -> dict[str, str]:
    """Each flag by its name; very many flags in one entry."""
    if len(flags) > _MOST_FLAGS:
        return {"XLA_FLAGS": " ".join(f"--{name}={value}" for name, value in flags.items())}
    return {f"XLA_FLAGS {name}": value for name, value in flags.items()}


def _accelerator(device: Any) -> dict[str, str]:
    """Versions of the driver, the runtime and the kernel libraries, as far as they can be found."""
    versions = {"platform version": " ".join(str(device.client.platform_version).split())}
    for path in map(Path, _VERSION_FILES):
        if path.is_file():
            versions[f"version in {path}"] = (
                path.read_text(encoding="utf-8", errors="replace").split("\n")[0].strip()
            )
    for package in metadata.distributions():
        # A broken installation has no name. Python uses the first of two.
        name = package.metadata["Name"] if "Name" in package.metadata else ""
        name = name.lower().replace("_", "-")
        if _PACKAGES.fullmatch(name):
            versions.setdefault(name, package.version)
    return versions

"""What comes before JAX starts its first backend: devices, XLA flags, the compilation cache, other processes."""

import os
from pathlib import Path

import jax

# Defaults, unless the user has set them. All groups of a job need the same, since flags change compiled bits.
XLA_FLAGS = (
    # Simulated devices share the cores; at the default of 40 s a busy machine aborts the process.
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    # The gradient of an embedding is a scatter, which a GPU adds in any order by default; and autotuning may choose
    # kernels of other roundings in each group.
    "--xla_gpu_deterministic_ops=true",
)
# Users who set this leave autotuning on, and must share its choices.
AUTOTUNED = "--xla_gpu_exclude_nondeterministic_ops"


def start_jax(*, cpu_devices: int | None, compilation_cache: Path | None) -> None:
    """Configure JAX. Call it before anything asks for a device.

    Args:
        cpu_devices: simulate this many devices on the CPU, or (None) use the machine's own.
        compilation_cache: keep compiled programs there, or (None) compile at every start.
    """
    os.environ["XLA_FLAGS"] = with_default_flags(os.environ.get("XLA_FLAGS", ""))
    if cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    if compilation_cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(compilation_cache))
        # By default JAX caches only slow compilations; a relaunched group needs every program at once.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def join_group() -> None:
    """Become one of the processes of a group, if `jaxft launch` has started several. Call it after `start_jax`."""
    nproc = processes_of_group()
    if nproc > 1:
        jax.distributed.initialize(num_processes=nproc, process_id=int(os.environ["JAXFT_RANK"]))


def processes_of_group() -> int:
    """Return how many processes of each group `jaxft launch` has started."""
    return int(os.environ.get("JAXFT_NPROC", "1"))


def with_default_flags(xla_flags: str) -> str:
    """Append our XLA flags to the user's, except those that the user has set."""
    named = {word.split("=")[0] for word in xla_flags.split()}
    if AUTOTUNED in named:
        named.add("--xla_gpu_deterministic_ops")
    return " ".join([*xla_flags.split(), *(flag for flag in XLA_FLAGS if flag.split("=")[0] not in named)])


def is_first_process() -> bool:
    """Return whether this process writes what a group has once: all of them run the same program."""
    return os.environ.get("JAXFT_RANK", "0") == "0"


def user_cache(name: str = "compilation") -> Path:
    """Return a folder for files that this user can make again, such as compiled programs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxft" / name

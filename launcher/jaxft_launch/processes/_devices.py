"""The accelerators of this machine, and how the processes of a launch share them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

# Each lists the devices that a process may use: of NVIDIA's runtime, and of AMD's.
CUDA, ROCR, HIP = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
# JAX's own count the devices that the runtime shows. Without the first, `jax.distributed` takes one by its own rules:
# under Slurm, each rank of a launcher would take the first one.
OF_JAX = ("JAX_LOCAL_DEVICE_IDS", "JAX_CUDA_VISIBLE_DEVICES", "JAX_ROCM_VISIBLE_DEVICES")


def devices_here(
    environment: Mapping[str, str],
    *,
    dev: Path = Path("/dev"),
    nodes: Path = Path("/sys/class/kfd/kfd/topology/nodes"),
) -> tuple[str, ...]:
    """Return the names of the accelerators that processes with this environment may use. No driver is asked."""
    if environment.get("JAX_PLATFORMS", "").startswith("cpu"):
        return ()
    if given := words_of(environment.get(CUDA, "")):
        return given
    rocr, hip = words_of(environment.get(ROCR, "")), words_of(environment.get(HIP, ""))
    if rocr and hip and all(word.isdecimal() and int(word) < len(rocr) for word in hip):
        return tuple(rocr[int(word)] for word in hip)  # they count what ROCR shows
    if rocr or hip:
        return rocr or hip
    count = len([file for file in dev.glob("nvidia*") if file.name.removeprefix("nvidia").isdecimal()])
    return tuple(map(str, range(count or _of_amd(nodes))))


def shares(devices: Sequence[str], count: int) -> list[tuple[str, ...]]:
    """Return the devices of each of `count` groups or processes: equal parts, in order. Some may be left over."""
    share = len(devices) // count
    return [tuple(devices[number * share : (number + 1) * share]) for number in range(count)]


def environment_of(devices: Sequence[str]) -> dict[str, str]:
    """Return the environment of a process that may use these devices; empty for all of them."""
    if not devices:
        return {}
    names, numbers = ",".join(devices), ",".join(map(str, range(len(devices))))
    return {CUDA: names, ROCR: names, HIP: numbers, **dict.fromkeys(OF_JAX, numbers)}


def words_of(comma_list: str) -> tuple[str, ...]:
    """Return what stands between the commas."""
    return tuple(word.strip() for word in comma_list.split(",") if word.strip())


def _of_amd(nodes: Path) -> int:
    """The number of AMD's accelerators: nodes of the kernel's topology that have a number of a GPU."""
    texts = [file.read_text(errors="replace").strip() for file in nodes.glob("*/gpu_id")]
    return len([text for text in texts if text not in ("", "0")])

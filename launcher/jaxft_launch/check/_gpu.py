"""What NVIDIA's and AMD's libraries tell about accelerators. `library`: the module pynvml, or amdsmi."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")

# What AMD calls violations. Its power limit (ppt_pwr) is left out: it holds the clocks of every busy device.
VIOLATIONS = ("prochot_thrm", "socket_thrm", "vr_thrm", "hbm_thrm")


class DeviceError(Exception):
    """A library does not answer, or knows no such device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The health of a device. None: it does not tell.

    Attributes:
        name: the number or the UUID by which it was asked for.
        lost: whether it does not answer any more.
        errors: uncorrected memory errors since the driver was loaded.
        slowed: whether the hardware lowers its clocks because of heat or a failing supply.
        link_errors: whether a link between devices has errors.
    """

    name: str
    lost: bool = False
    errors: int | None = None
    slowed: bool | None = None
    link_errors: bool | None = None


def healths(names: Sequence[str]) -> list[Health]:
    """Ask about devices by their names; none: about all of this machine.

    Raises:
        DeviceError: no library is installed, or it does not answer, or there is no such device.
    """
    if importlib.util.find_spec("pynvml") is not None:
        return nvml_healths(importlib.import_module("pynvml"), names)
    if importlib.util.find_spec("amdsmi") is not None:
        return amd_healths(importlib.import_module("amdsmi"), names)
    raise DeviceError(
        "no library for devices is installed. For NVIDIA: pip install 'jaxft-launch[nvml]'; for AMD: pip install "
        "amdsmi==X.Y.Z, with the version of this machine's ROCm"
    )


def nvml_healths(library: Any, names: Sequence[str]) -> list[Health]:
    """Ask NVML."""
    try:
        library.nvmlInit()
        count = library.nvmlDeviceGetCount()
    except library.NVMLError as error:
        raise DeviceError(f"NVML does not answer: {error}") from error
    return [_nvml_health(library, name) for name in _known(names, count, others=True)]


def _nvml_health(library: Any, name: str) -> Health:
    slow = (
        library.nvmlClocksThrottleReasonHwSlowdown
        | library.nvmlClocksThrottleReasonHwThermalSlowdown
        | library.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
    )
    kind = library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    try:
        if name.isdecimal():
            handle = library.nvmlDeviceGetHandleByIndex(int(name))
        else:
            handle = library.nvmlDeviceGetHandleByUUID(name)
        return Health(
            name=name,
            errors=_nvml_told(
                library, lambda: library.nvmlDeviceGetTotalEccErrors(handle, kind, library.NVML_VOLATILE_ECC)
            ),
            slowed=_nvml_told(
                library, lambda: bool(library.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & slow)
            ),
        )
    except library.NVMLError as error:
        if error.value == library.NVML_ERROR_GPU_IS_LOST:
            return Health(name=name, lost=True)
        raise DeviceError(f"NVML does not tell of device {name}: {error}") from error


def _nvml_told(library: Any, ask: Callable[[], _T]) -> _T | None:
    """Return an answer; None if devices of this kind do not tell it."""
    try:
        return ask()
    except library.NVMLError as error:
        if error.value == library.NVML_ERROR_NOT_SUPPORTED:
            return None
        raise


def amd_healths(library: Any, names: Sequence[str]) -> list[Health]:
    """Ask AMD SMI."""
    try:
        library.amdsmi_init()
        handles = library.amdsmi_get_processor_handles()
    except library.AmdSmiException as error:
        raise DeviceError(f"AMD SMI does not answer: {error}") from error
    return [_amd_health(library, name, handles[int(name)]) for name in _known(names, len(handles))]


def _amd_health(library: Any, name: str, handle: Any) -> Health:
    def answered(ask: Callable[[Any], _T]) -> _T | None:
        try:
            return ask(handle)
        except library.AmdSmiException:  # devices of this kind do not tell it, or this one does not answer
            return None

    errors = answered(library.amdsmi_get_gpu_total_ecc_count)
    violations = answered(library.amdsmi_get_violation_status)
    link = answered(library.amdsmi_gpu_xgmi_error_status)
    return Health(
        name=name,
        errors=None if errors is None else int(errors["uncorrectable_count"]),
        slowed=None if violations is None else _amd_slowed(violations),
        link_errors=None if link is None else bool(int(link)),
    )


def _amd_slowed(violations: Mapping[str, Any]) -> bool | None:
    found = [value for name in VIOLATIONS if (value := violations[f"active_{name}"]) != "N/A"]
    return any(found) if found else None


def _known(names: Sequence[str], count: int, *, others: bool = False) -> Sequence[str]:
    """Return the names, by default of all devices. `others`: the library may know names that are not numbers."""
    unknown = [name for name in names if (int(name) >= count if name.isdecimal() else not others)]
    if unknown or count == 0:
        raise DeviceError(
            f"this machine has {count} such devices, and {', '.join(unknown or names or ['all'])} was asked for"
        )
    return names or [str(number) for number in range(count)]

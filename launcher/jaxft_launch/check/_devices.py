"""What NVIDIA's and AMD's libraries tell about accelerators. They are imported when the first reading needs them."""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class DeviceError(Exception):
    """A library gave no value. The message says why."""


@dataclass(frozen=True, slots=True)
class Library:
    """A Python package, and how to install it."""

    module: str
    remedy: str


LIBRARIES: Mapping[str, Library] = {
    "nvml": Library("pynvml", "pip install 'jaxft-launch[nvml]'"),
    # Its version must be that of the machine's ROCm, so jaxft does not choose one.
    "amdsmi": Library("amdsmi", "pip install amdsmi==X.Y.Z, with the version of this machine's ROCm"),
}

TEMPERATURE = "temperature_c"
# Since the life of the group began: the driver's own counts go back to its start.
ERRORS = "uncorrected_errors"
# 1 while the hardware has lowered its clocks because of heat or power, else 0.
THROTTLED = "throttled"
# 0: none; 1: one; 2: several.
XGMI = "xgmi_errors"
# AMD counts the same errors by the part of the device that had them, if it can: uncorrected_errors_umc, ...
BLOCKS = (
    *("umc", "sdma", "gfx", "mmhub", "athub", "pcie_bif", "hdp", "xgmi_wafl"),
    *("df", "smn", "sem", "mp0", "mp1", "fuse"),
)
# What AMD calls violations. Its power limit (ppt_pwr) is left out: it holds the clocks of every busy device.
VIOLATIONS = ("prochot_thrm", "socket_thrm", "vr_thrm", "hbm_thrm")
METRICS: Mapping[str, tuple[str, ...]] = {
    "nvml": (TEMPERATURE, ERRORS, THROTTLED),
    "amdsmi": (TEMPERATURE, ERRORS, THROTTLED, XGMI, *(f"{ERRORS}_{block}" for block in BLOCKS)),
}


def worst_of(source: str, metric: str, devices: Sequence[int]) -> Callable[[], tuple[float, str]]:
    """Return a function that measures the worst of some devices, and says which it is.

    Args:
        source: a key of METRICS.
        metric: one of its metrics.
        devices: their numbers, in the library's order; empty: all of this machine.

    The function raises DeviceError if there is no such device, or no answer.
    """
    before: dict[int, float] = {}

    def measure() -> tuple[float, str]:
        library = importlib.import_module(LIBRARIES[source].module)
        values = {"nvml": nvml_values, "amdsmi": amdsmi_values}[source](library, metric, devices)
        if metric.startswith(ERRORS):
            # A device that is lost at its first reading stays at infinity.
            values = {
                number: value - before.setdefault(number, 0.0 if math.isinf(value) else value)
                for number, value in values.items()
            }
        number = max(values, key=lambda number: values[number])
        if math.isinf(values[number]):
            return math.inf, f"device {number} does not answer any more"
        return values[number], f"{metric} of device {number} is {values[number]:g}"

    return measure


def nvml_values(nvml: Any, metric: str, devices: Sequence[int]) -> dict[int, float]:
    """Return a metric of each device by number; infinity for one that has been lost. `nvml`: the module pynvml."""
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        raise DeviceError(f"NVML does not answer: {error}") from error
    return {number: _nvml_value(nvml, metric, number) for number in _numbers(devices, count)}


def _nvml_value(nvml: Any, metric: str, number: int) -> float:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
        match metric:
            case "temperature_c":
                return float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            case "uncorrected_errors":
                kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
                return float(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC))
            case _:
                slow = (
                    nvml.nvmlClocksThrottleReasonHwSlowdown
                    | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
                    | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
                )
                return float(bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & slow))
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
            return math.inf
        raise DeviceError(f"NVML has no {metric} of device {number}: {error}") from error


def amdsmi_values(amdsmi: Any, metric: str, devices: Sequence[int]) -> dict[int, float]:
    """Return a metric of each device by number. `amdsmi`: the module of this name."""
    number = -1
    try:
        amdsmi.amdsmi_init()
        handles = amdsmi.amdsmi_get_processor_handles()
        values: dict[int, float] = {}
        for number in _numbers(devices, len(handles)):
            values[number] = _amdsmi_value(amdsmi, metric, handles[number])
        return values
    except amdsmi.AmdSmiException as error:
        what = "does not answer" if number < 0 else f"has no {metric} of device {number}"
        raise DeviceError(f"AMD SMI {what}: {error}") from error


def _amdsmi_value(amdsmi: Any, metric: str, handle: Any) -> float:
    match metric:
        case "temperature_c":
            where, what = amdsmi.AmdSmiTemperatureType.HOTSPOT, amdsmi.AmdSmiTemperatureMetric.CURRENT
            return float(amdsmi.amdsmi_get_temp_metric(handle, where, what))
        case "uncorrected_errors":
            return float(amdsmi.amdsmi_get_gpu_total_ecc_count(handle)["uncorrectable_count"])
        case "throttled":
            return float(_amdsmi_throttled(amdsmi.amdsmi_get_violation_status(handle)))
        case "xgmi_errors":
            return float(amdsmi.amdsmi_gpu_xgmi_error_status(handle))
        case _:
            block = amdsmi.AmdSmiGpuBlock[metric.removeprefix(f"{ERRORS}_").upper()]
            return float(amdsmi.amdsmi_get_gpu_ecc_count(handle, block)["uncorrectable_count"])


def _amdsmi_throttled(status: Mapping[str, Any]) -> bool:
    told = [value for name in VIOLATIONS if (value := status[f"active_{name}"]) != "N/A"]
    if not told:
        raise DeviceError("AMD SMI tells of no violations: it does so for the MI300 series and newer devices")
    return any(told)


def _numbers(devices: Sequence[int], count: int) -> Sequence[int]:
    numbers = devices or range(count)
    if not numbers or max(numbers) >= count:
        raise DeviceError(
            f"this machine has {count} such devices, and the group uses {list(devices) or 'all'}"
        )
    return numbers

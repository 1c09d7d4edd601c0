"""The accelerators' libraries, played by stand-ins: no device and no driver is needed, and none is tested.

The stand-ins have the names, arguments and errors of nvidia-ml-py 13.615 and of amdsmi 7.0 that `_devices.py` uses.
"""

import re
import sys
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from jaxft_launch.check._devices import METRICS, DeviceError, worst_of
from jaxft_launch.check._readings import Level
from jaxft_launch.check._rules import rule_of
from jaxft_launch.check._sources import Measured


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class FakeNvml(ModuleType):
    """Devices with a temperature, a count of errors and reasons for low clocks each; `lost` ones do not answer."""

    NVMLError = NVMLError
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_TEMPERATURE_GPU = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlClocksThrottleReasonHwSlowdown = 0x8
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.temperatures = [40, 71, 55]
        self.errors = [0, 7, 0]
        self.reasons = [0x4, 0, 0]
        self.lost: set[int] = set()
        self.driver = True

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLError(9)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.temperatures)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.lost:
            raise NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        return index

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self.temperatures[handle]

    def nvmlDeviceGetTotalEccErrors(self, handle: int, errorType: int, counterType: int) -> int:
        assert (errorType, counterType) == (1, 0)
        if self.errors[handle] < 0:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return self.errors[handle]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self.reasons[handle]


class AmdSmiException(Exception):
    pass


class AmdSmiTemperatureType(IntEnum):
    EDGE = 0
    HOTSPOT = 1


class AmdSmiTemperatureMetric(IntEnum):
    CURRENT = 0


class AmdSmiGpuBlock(IntEnum):
    """Each is a bit, as in the library."""

    UMC = 1 << 0
    SDMA = 1 << 1
    GFX = 1 << 2
    MMHUB = 1 << 3
    ATHUB = 1 << 4
    PCIE_BIF = 1 << 5
    HDP = 1 << 6
    XGMI_WAFL = 1 << 7
    DF = 1 << 8
    SMN = 1 << 9
    SEM = 1 << 10
    MP0 = 1 << 11
    MP1 = 1 << 12
    FUSE = 1 << 13


class FakeAmdSmi(ModuleType):
    AmdSmiException = AmdSmiException
    AmdSmiTemperatureType = AmdSmiTemperatureType
    AmdSmiTemperatureMetric = AmdSmiTemperatureMetric
    AmdSmiGpuBlock = AmdSmiGpuBlock

    def __init__(self) -> None:
        super().__init__("amdsmi")
        self.devices = [
            SimpleNamespace(hotspot=50, errors=3, xgmi=0, blocks={"UMC": 3}, violations={}),
            SimpleNamespace(hotspot=95, errors=0, xgmi=2, blocks={}, violations={}),
        ]
        self.driver = True

    def amdsmi_init(self) -> None:
        if not self.driver:
            raise AmdSmiException("no driver")

    def amdsmi_get_processor_handles(self) -> list[Any]:
        return self.devices

    def amdsmi_get_temp_metric(self, handle: Any, sensor_type: Any, metric: Any) -> int:
        assert (sensor_type, metric) == (AmdSmiTemperatureType.HOTSPOT, AmdSmiTemperatureMetric.CURRENT)
        if handle.hotspot is None:
            raise AmdSmiException("not supported")
        return handle.hotspot

    def amdsmi_get_gpu_total_ecc_count(self, handle: Any) -> dict[str, int]:
        return {"correctable_count": 99, "uncorrectable_count": handle.errors, "deferred_count": 0}

    def amdsmi_get_gpu_ecc_count(self, handle: Any, block: AmdSmiGpuBlock) -> dict[str, int]:
        assert isinstance(block, AmdSmiGpuBlock)
        if handle.blocks is None:
            raise AmdSmiException("not supported")
        return {
            "correctable_count": 99,
            "uncorrectable_count": handle.blocks.get(block.name, 0),
            "deferred_count": 0,
        }

    def amdsmi_get_violation_status(self, handle: Any) -> dict[str, Any]:
        names = ("prochot_thrm", "ppt_pwr", "socket_thrm", "vr_thrm", "hbm_thrm", "gfx_clk_below_host_limit")
        if handle.violations is None:
            return {f"active_{name}": "N/A" for name in names}
        return {f"active_{name}": handle.violations.get(name, False) for name in names}

    def amdsmi_gpu_xgmi_error_status(self, handle: Any) -> int:
        return handle.xgmi


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.fixture
def amdsmi(monkeypatch: pytest.MonkeyPatch) -> FakeAmdSmi:
    fake = FakeAmdSmi()
    monkeypatch.setitem(sys.modules, "amdsmi", fake)
    return fake


def test_the_worst_device_counts(nvml: FakeNvml) -> None:
    assert worst_of("nvml", "temperature_c", ())() == (71.0, "temperature_c of device 1 is 71")
    assert worst_of("nvml", "temperature_c", (0, 2))() == (55.0, "temperature_c of device 2 is 55")


def test_errors_count_from_the_first_reading(nvml: FakeNvml) -> None:
    measure = worst_of("nvml", "uncorrected_errors", ())
    assert measure()[0] == 0.0
    nvml.errors[2] = 1
    nvml.errors[1] = 9
    assert measure() == (2.0, "uncorrected_errors of device 1 is 2")
    assert worst_of("nvml", "uncorrected_errors", ())()[0] == 0.0  # a new life


def test_only_slow_hardware_is_throttled(nvml: FakeNvml) -> None:
    """Device 0 is below its highest clocks because of its power cap, which is normal."""
    measure = worst_of("nvml", "throttled", ())
    assert measure()[0] == 0.0
    nvml.reasons[2] = 0x40 | 0x4
    assert measure() == (1.0, "throttled of device 2 is 1")


@pytest.mark.parametrize("metric", METRICS["nvml"])
def test_a_lost_device_is_beyond_every_limit(nvml: FakeNvml, metric: str) -> None:
    nvml.lost.add(1)
    rule = rule_of(
        {"name": "x", "source": "nvml", "metric": metric, "action": "drain", "critical": 1_000_000}
    )
    source = Measured(rule.limits, worst_of("nvml", metric, ()))
    for _ in range(2):
        reading = source.read()
        assert reading is not None
        assert (reading.level, reading.text) == (Level.CRITICAL, "device 1 does not answer any more")


def test_what_a_library_cannot_tell_is_unknown(nvml: FakeNvml) -> None:
    nvml.errors[0] = -1
    with pytest.raises(DeviceError, match="NVML has no uncorrected_errors of device 0: error 3"):
        worst_of("nvml", "uncorrected_errors", ())()
    with pytest.raises(
        DeviceError, match=re.escape("this machine has 3 such devices, and the group uses [2, 3]")
    ):
        worst_of("nvml", "temperature_c", (2, 3))()
    nvml.temperatures = []
    with pytest.raises(DeviceError, match="this machine has 0 such devices, and the group uses all"):
        worst_of("nvml", "temperature_c", ())()
    nvml.driver = False
    with pytest.raises(DeviceError, match="NVML does not answer: error 9"):
        worst_of("nvml", "temperature_c", ())()


def test_amd_devices(amdsmi: FakeAmdSmi) -> None:
    assert worst_of("amdsmi", "temperature_c", ())() == (95.0, "temperature_c of device 1 is 95")
    assert worst_of("amdsmi", "temperature_c", (0,))()[0] == 50.0
    assert worst_of("amdsmi", "xgmi_errors", ())() == (2.0, "xgmi_errors of device 1 is 2")
    measure = worst_of("amdsmi", "uncorrected_errors", ())
    assert measure()[0] == 0.0
    amdsmi.devices[0].errors = 4
    assert measure() == (1.0, "uncorrected_errors of device 0 is 1")


def test_what_amd_cannot_tell_is_unknown(amdsmi: FakeAmdSmi) -> None:
    amdsmi.devices[1].hotspot = None
    with pytest.raises(DeviceError, match="AMD SMI has no temperature_c of device 1: not supported"):
        worst_of("amdsmi", "temperature_c", ())()
    amdsmi.driver = False
    with pytest.raises(DeviceError, match="AMD SMI does not answer: no driver"):
        worst_of("amdsmi", "temperature_c", ())()


@pytest.mark.parametrize("block", [block.name for block in AmdSmiGpuBlock])
def test_amd_errors_of_one_block(amdsmi: FakeAmdSmi, block: str) -> None:
    metric = f"uncorrected_errors_{block.lower()}"
    assert metric in METRICS["amdsmi"]
    measure = worst_of("amdsmi", metric, ())
    assert measure()[0] == 0.0  # since the life of the group began
    amdsmi.devices[1].blocks[block] = 2
    assert measure() == (2.0, f"{metric} of device 1 is 2")
    amdsmi.devices[0].blocks = None
    with pytest.raises(DeviceError, match=f"AMD SMI has no {metric} of device 0: not supported"):
        measure()


@pytest.mark.parametrize("name", ["prochot_thrm", "socket_thrm", "vr_thrm", "hbm_thrm"])
def test_an_amd_device_that_is_too_hot_is_throttled(amdsmi: FakeAmdSmi, name: str) -> None:
    measure = worst_of("amdsmi", "throttled", ())
    assert measure()[0] == 0.0
    amdsmi.devices[1].violations = {name: True}
    assert measure() == (1.0, "throttled of device 1 is 1")


def test_an_amd_device_at_its_power_limit_is_not_throttled(amdsmi: FakeAmdSmi) -> None:
    amdsmi.devices[0].violations = {"ppt_pwr": True, "gfx_clk_below_host_limit": True, "hbm_thrm": "N/A"}
    assert worst_of("amdsmi", "throttled", ())()[0] == 0.0


def test_an_older_amd_device_does_not_tell_whether_it_is_throttled(amdsmi: FakeAmdSmi) -> None:
    amdsmi.devices[0].violations = None
    with pytest.raises(DeviceError, match="no violations: it does so for the MI300 series and newer"):
        worst_of("amdsmi", "throttled", ())()

"""`jaxft check`: one line, and an exit status as in Nagios.

Stand-ins play the accelerators' libraries: no device and no driver is needed, and none is tested. They have the
names, arguments and errors of nvidia-ml-py 13.615 and of amdsmi 7.0 that the check uses.
"""

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxft_launch.check._check import CheckDisk, CheckMemory, Level, of_device, run_check
from jaxft_launch.check._gpu import DeviceError, Health, amd_healths, nvml_healths

OK, WARNING, CRITICAL, UNKNOWN = Level


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class FakeNvml:
    """Devices with a count of errors (negative: unknown) and reasons for low clocks; `lost` ones do not answer."""

    NVMLError = NVMLError
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlClocksThrottleReasonHwSlowdown = 0x8
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80

    def __init__(self) -> None:
        self.errors = [0, 0, 0]
        self.reasons = [0x4, 0, 0]  # device 0 is at its power limit, which is normal
        self.lost: set[int] = set()
        self.driver = True

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLError(9)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.errors)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.lost:
            raise NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if not uuid.startswith("GPU-"):
            raise NVMLError(6)
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetTotalEccErrors(self, handle: int, errorType: int, counterType: int) -> int:
        assert (errorType, counterType) == (1, 0)
        if self.errors[handle] < 0:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return self.errors[handle]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self.reasons[handle]


def nvml_levels(fake: FakeNvml, *names: str) -> list[Level]:
    return [of_device(health)[0] for health in nvml_healths(fake, names)]


def test_nvidia_devices() -> None:
    fake = FakeNvml()
    assert nvml_levels(fake) == [OK, OK, OK]
    fake.errors = [7, -1, 0]
    fake.reasons[1] |= 0x40
    fake.lost.add(2)
    assert nvml_levels(fake) == [CRITICAL, WARNING, CRITICAL]
    assert nvml_levels(fake, "1", "GPU-0") == [WARNING, CRITICAL]


def test_what_nvml_cannot_tell_is_an_error() -> None:
    fake = FakeNvml()
    with pytest.raises(DeviceError, match="this machine has 3 such devices, and 3 was asked for"):
        nvml_healths(fake, ["2", "3"])
    with pytest.raises(DeviceError, match="NVML does not tell of device MIG-0: error 6"):
        nvml_healths(fake, ["MIG-0"])
    fake.errors = []
    with pytest.raises(DeviceError, match="this machine has 0 such devices, and all was asked for"):
        nvml_healths(fake, [])
    fake.driver = False
    with pytest.raises(DeviceError, match="NVML does not answer: error 9"):
        nvml_healths(fake, [])


class AmdSmiException(Exception):
    pass


class FakeAmdSmi:
    AmdSmiException = AmdSmiException

    def __init__(self) -> None:
        self.devices = [SimpleNamespace(errors=0, xgmi=0, violations={}) for _ in range(2)]
        self.driver = True

    def amdsmi_init(self) -> None:
        if not self.driver:
            raise AmdSmiException("no driver")

    def amdsmi_get_processor_handles(self) -> list[Any]:
        return self.devices

    def amdsmi_get_gpu_total_ecc_count(self, handle: Any) -> dict[str, int]:
        if handle.errors is None:
            raise AmdSmiException("not supported")
        return {"correctable_count": 99, "uncorrectable_count": handle.errors, "deferred_count": 0}

    def amdsmi_get_violation_status(self, handle: Any) -> dict[str, Any]:
        names = ("prochot_thrm", "ppt_pwr", "socket_thrm", "vr_thrm", "hbm_thrm", "gfx_clk_below_host_limit")
        if handle.violations is None:
            return {f"active_{name}": "N/A" for name in names}
        return {f"active_{name}": handle.violations.get(name, False) for name in names}

    def amdsmi_gpu_xgmi_error_status(self, handle: Any) -> int:
        return handle.xgmi


def amd_levels(fake: FakeAmdSmi) -> list[Level]:
    return [of_device(health)[0] for health in amd_healths(fake, [])]


@pytest.mark.parametrize("name", ["prochot_thrm", "hbm_thrm"])
def test_an_amd_device_that_is_too_hot_is_slowed(name: str) -> None:
    fake = FakeAmdSmi()
    fake.devices[0].violations = {"ppt_pwr": True, "gfx_clk_below_host_limit": True, "hbm_thrm": "N/A"}
    assert amd_levels(fake) == [OK, OK]  # at its power limit, which is normal
    fake.devices[0].violations[name] = True
    assert amd_levels(fake) == [WARNING, OK]


def test_amd_devices() -> None:
    fake = FakeAmdSmi()
    fake.devices[0].errors, fake.devices[1].xgmi = 4, 2
    assert amd_levels(fake) == [CRITICAL, WARNING]
    fake.devices[0].errors = fake.devices[0].violations = None  # older than the MI300 series
    assert amd_levels(fake) == [UNKNOWN, WARNING]
    with pytest.raises(DeviceError, match="GPU-1 was asked for"):
        amd_healths(fake, ["GPU-1"])
    fake.driver = False
    with pytest.raises(DeviceError, match="AMD SMI does not answer: no driver"):
        amd_healths(fake, [])


def test_of_several_devices_the_worst_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Health(name="0"), Health(name="1", errors=2, slowed=True), Health(name="2", slowed=True)]
    monkeypatch.setattr("jaxft_launch.check._check.healths", lambda _: found)
    assert run_check(["gpu"]) == CRITICAL
    assert capsys.readouterr().out == "CRITICAL - device 1 has had 2 uncorrected memory errors\n"
    found.pop(1)
    assert run_check(["gpu"]) == WARNING


@pytest.mark.parametrize(
    ("visible", "asked"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2, GPU-7"}, ("2", "GPU-7")),
        ({"ROCR_VISIBLE_DEVICES": "5"}, ("5",)),
        ({}, ()),
    ],
)
def test_a_group_is_judged_by_its_own_devices(
    visible: dict[str, str], asked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher gives a check the environment of its group."""
    seen: list[tuple[str, ...]] = []
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in visible.items():
        monkeypatch.setenv(name, value)
    healthy = [Health(name="0", errors=0)]
    monkeypatch.setattr("jaxft_launch.check._check.healths", lambda names: seen.append(names) or healthy)
    assert run_check(["gpu"]) == OK
    assert seen == [asked]


def test_the_disk_is_that_of_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stat = os.statvfs(tmp_path)
    free_gb = stat.f_bavail * stat.f_frsize / 1e9
    assert run_check(["disk", str(tmp_path), "--warning-gb", f"{free_gb + 100}"]) == WARNING
    match = re.fullmatch(r"WARNING - (\S+) GB are free on the disk of .*\n", capsys.readouterr().out)
    assert match is not None
    assert float(match[1]) == pytest.approx(free_gb, rel=0.2, abs=1.0)
    level, text = CheckDisk(folder=tmp_path / "gone").read()
    assert (level, "cannot be asked" in text) == (UNKNOWN, True)


def test_host_memory_is_what_the_container_leaves(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    check = CheckMemory(critical_gb=2.0)
    assert check.read(meminfo, tmp_path)[0] is UNKNOWN
    meminfo.write_text("MemAvailable:   8000000 kB\n")
    assert check.read(meminfo, tmp_path) == (OK, "8.2 GB of host memory are available")
    for name, text in (("max", "2000000000"), ("current", "500000000"), ("stat", "inactive_file 0")):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert check.read(meminfo, tmp_path) == (CRITICAL, "1.5 GB of host memory are available")


@pytest.mark.parametrize("words", [[], ["gpus"], ["disk"], ["memory", "--warning-gb", "much"]])
def test_a_wrong_flag_is_unknown_and_drains_no_group(words: list[str]) -> None:
    """The usual status of a wrong flag, 2, would be critical."""
    assert run_check(words) == UNKNOWN

"""`jaxft check`: ready-made checks for `jaxft launch --check`, each with one line and an exit status as in Nagios."""

import os
import shutil
import sys
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Annotated

import tyro

from jaxft._base._room import CGROUP, MEMINFO, available_bytes
from jaxft_launch.check._gpu import DeviceError, Health, healths
from jaxft_launch.processes._devices import CUDA, ROCR, words_of


class Level(IntEnum):
    """How healthy something is, as the exit status of a plugin of Nagios."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


Reading = tuple[Level, str]


@dataclass(frozen=True, kw_only=True)
class CheckGpu:
    """Devices of NVIDIA (NVML) or AMD (AMD SMI). Critical: one is lost, or has uncorrected memory errors. Warning:
    the hardware lowers its clocks because of heat or a failing supply, or a link between devices has errors.

    It asks for the devices that CUDA_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES name (with `jaxft launch --check`, the
    group's), or else for all devices of this machine.
    """

    def read(self) -> Reading:
        given = os.environ.get(CUDA, "") or os.environ.get(ROCR, "")
        try:
            found = healths(words_of(given))
        except DeviceError as error:
            return Level.UNKNOWN, str(error)
        return max((of_device(health) for health in found), key=lambda reading: _URGENCY.index(reading[0]))


@dataclass(frozen=True, kw_only=True)
class CheckDisk:
    """Free space on the disk of a folder, in GB (1e9 bytes)."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A folder on that disk."""
    warning_gb: float = 0.0
    """Warn if there is less."""
    critical_gb: float = 0.0
    """Critical if there is less."""

    def read(self) -> Reading:
        try:
            free_gb = shutil.disk_usage(self.folder).free / 1e9
        except OSError as error:
            return Level.UNKNOWN, f"the disk of {self.folder} cannot be asked: {error}"
        level = below(free_gb, warning=self.warning_gb, critical=self.critical_gb)
        return level, f"{free_gb:.1f} GB are free on the disk of {self.folder}"


@dataclass(frozen=True, kw_only=True)
class CheckMemory:
    """Host memory that programs can still get, with the limit of the container (cgroup v2), in GB (1e9 bytes)."""

    warning_gb: float = 0.0
    """Warn if there is less."""
    critical_gb: float = 0.0
    """Critical if there is less."""

    def read(self, meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> Reading:
        free_bytes = available_bytes(meminfo, cgroup)
        if free_bytes is None:
            return Level.UNKNOWN, f"neither {meminfo} nor {cgroup} shows how much memory is available"
        level = below(free_bytes / 1e9, warning=self.warning_gb, critical=self.critical_gb)
        return level, f"{free_bytes / 1e9:.1f} GB of host memory are available"


# Which reading of several devices counts: a device without an answer must not hide a lost device.
_URGENCY = (Level.OK, Level.UNKNOWN, Level.WARNING, Level.CRITICAL)
CHECKS = {"gpu": CheckGpu, "disk": CheckDisk, "memory": CheckMemory}


def run_check(arguments: list[str]) -> int:
    """Print one line, and return the exit status."""
    try:
        options = tyro.extras.subcommand_cli_from_dict(CHECKS, prog="jaxft check", args=arguments)
    except SystemExit as end:
        # 2, the usual status of a wrong flag, would be critical, and drain a group.
        return Level.UNKNOWN if end.code else 0
    level, text = options.read()
    sys.stdout.write(f"{level.name} - {text}\n")
    return level


def below(value: float, *, warning: float, critical: float) -> Level:
    """Return the level of a value of which a low one is bad."""
    if value < critical:
        return Level.CRITICAL
    return Level.WARNING if value < warning else Level.OK


def of_device(health: Health) -> Reading:
    """Return the level of a device, and the reason."""
    name = f"device {health.name}"
    if health.lost:
        return Level.CRITICAL, f"{name} does not answer any more"
    if health.errors:
        return Level.CRITICAL, f"{name} has had {health.errors} uncorrected memory errors"
    if health.slowed:
        return Level.WARNING, f"{name} has lowered its clocks because of heat or its supply"
    if health.link_errors:
        return Level.WARNING, f"{name} has errors on a link to another device"
    if health.errors is None and health.slowed is None:
        return Level.UNKNOWN, f"{name} shows neither its memory errors nor why its clocks are low"
    return Level.OK, "no device is lost, slowed by its hardware, or has uncorrected memory errors"

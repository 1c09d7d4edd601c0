"""What the rules measure: a command's exit status, host memory, disk, step time, the clock, and devices."""

import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jaxft._base._host_memory import CGROUP, MEMINFO, available_bytes
from jaxft_launch.check._devices import DeviceError, worst_of
from jaxft_launch.check._readings import Level, Limits, Reading
from jaxft_launch.check._rules import Rule
from jaxft_launch.client._clock import clock_difference
from jaxft_launch.client._port import PortError, ask, job_path
from jaxft_launch.processes._processes import kill_beside, start_beside

# Nagios takes one line of a plugin's output.
MOST_OUTPUT_BYTES = 4096
MOST_TEXT = 200
LEVELS = {0: Level.OK, 1: Level.WARNING, 2: Level.CRITICAL, 3: Level.UNKNOWN}


class NoValue(Exception):
    """A measurement is not possible. The message says why."""


class Source(Protocol):
    """Takes readings for one rule and one life of a group."""

    def read(self) -> Reading | None:
        """Return a reading, or None if there is nothing to measure yet. May take as long as the rule's timeout."""
        ...

    def end(self) -> None:
        """End a reading that is under way, from another thread."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """For which group the readings are.

    Attributes:
        group: its name.
        devices: the numbers of its devices; empty: all of this machine.
        environment: what its processes have in their environment.
        folder: of the launch.
        http: the URL of the coordinator's HTTP port; empty if it is not known.
    """

    group: str
    devices: tuple[int, ...]
    environment: Mapping[str, str]
    folder: Path
    http: str


def source_of(rule: Rule, place: Place) -> Source:
    """Return what takes the readings of a rule for a group."""
    match rule.source:
        case "command":
            return Command(rule, place)
        case "memory":
            return Measured(rule.limits, free_memory_gb)
        case "disk":
            return Measured(rule.limits, lambda: free_disk_gb(rule.path))
        case "step_time":
            return Measured(rule.limits, lambda: slowness(place.http, rule.job, place.group))
        case "clock":
            return Measured(rule.limits, lambda: skew(place.http))
        case _:
            return Measured(rule.limits, worst_of(rule.source, rule.metric, place.devices))


class Measured:
    """Compares a measurement with the limits of a rule."""

    def __init__(self, limits: Limits, measure: Callable[[], tuple[float, str] | None]) -> None:
        """`measure` returns a value and what it is in words, or None if there is nothing to measure yet."""
        self._limits = limits
        self._measure = measure

    def read(self) -> Reading | None:
        try:
            found = self._measure()
        except (NoValue, DeviceError, PortError) as error:
            return Reading(Level.UNKNOWN, str(error))
        return None if found is None else Reading(self._limits.level_of(found[0]), found[1])

    def end(self) -> None:
        """Do nothing: a measurement has its own deadline, or ends with this process."""


def free_memory_gb(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> tuple[float, str]:
    """Return the host memory that programs here can still get, in GB (1e9 bytes)."""
    free_bytes = available_bytes(meminfo, cgroup)
    if free_bytes is None:
        raise NoValue(f"neither {meminfo} nor {cgroup} tells how much memory is available")
    return free_bytes / 1e9, f"{free_bytes / 1e9:.1f} GB of host memory are available"


def free_disk_gb(path: str) -> tuple[float, str]:
    """Return what is free on the disk of a folder, in GB (1e9 bytes)."""
    try:
        free_gb = shutil.disk_usage(path).free / 1e9
    except OSError as error:
        raise NoValue(f"the disk of {path} cannot be asked: {error}") from error
    return free_gb, f"{free_gb:.1f} GB are free on the disk of {path}"


def slowness(http: str, job: str, group: str) -> tuple[float, str] | None:
    """Return the compute time of a group's step, divided by the median of its peers; None if one is not known.

    Computing is what a group does by itself: in an exchange, its peers wait for it.

    Raises:
        PortError: the coordinator's HTTP port gives no answer.
        NoValue: it serves several jobs, and the rule names none.
    """
    if not job:
        jobs = [str(one["job"]) for one in ask(http, "jobs")["jobs"]]
        if len(jobs) > 1:
            raise NoValue(f"the coordinator serves {len(jobs)} jobs: name one with `job` in the rule")
        if not jobs:
            return None
        (job,) = jobs
    return slowness_in(ask(http, job_path(job)), group)


def skew(http: str) -> tuple[float, str]:
    """Return by how many seconds this machine's clock differs from the coordinator's, at least.

    A long round trip makes the measurement uncertain, and must not look like a wrong clock.

    Raises:
        PortError: the coordinator's HTTP port gives no answer.
    """
    found = clock_difference(http)
    return found.least_s, f"this machine's clock is {found}"


def slowness_in(view: Mapping[str, Any], group: str) -> tuple[float, str] | None:
    """Return the same from the API's view of a job."""
    times = {
        str(one["group"]): float(one["compute_s"])
        for one in view["group_list"]
        if one["state"] == "member" and one.get("compute_s")
    }
    own_s = times.pop(group, None)
    if own_s is None or not times:
        return None
    peers_s = statistics.median(times.values())
    text = f"a step computes for {own_s:.3f} s, and for {peers_s:.3f} s in the median of {len(times)} peers"
    return own_s / peers_s, text


class Command:
    """Runs a command of the user, whose exit status means the same as that of a plugin of Nagios."""

    def __init__(self, rule: Rule, place: Place) -> None:
        values = {
            "{group}": place.group,
            "{devices}": ",".join(map(str, place.devices)),
            "{folder}": str(place.folder),
        }
        self._words = [filled(word, values) for word in rule.command]
        self._timeout_s = rule.timeout_s
        self._environment = {**os.environ, **place.environment}
        self._process: subprocess.Popen[bytes] | None = None

    def read(self) -> Reading:
        if shutil.which(self._words[0]) is None:
            return Reading(Level.UNKNOWN, f"there is no program {self._words[0]!r} to run")
        with tempfile.TemporaryFile() as output:
            self._process = process = start_beside(
                self._words, output, stderr=subprocess.STDOUT, environment=self._environment
            )
            try:
                status = process.wait(self._timeout_s)
            except subprocess.TimeoutExpired:
                self.end()
                process.wait()
                return Reading(
                    Level.UNKNOWN,
                    f"{self._words[0]} did not end within {self._timeout_s:g} s, and was killed",
                )
            output.seek(0)
            said = output.read(MOST_OUTPUT_BYTES).decode(errors="replace")
        if status not in LEVELS:
            said = f"{self._words[0]} ended with status {status}, not 0 to 3: {said.strip()}"
        return Reading(LEVELS.get(status, Level.UNKNOWN), first_line(said) or f"exit status {status}")

    def end(self) -> None:
        if (process := self._process) is not None:
            kill_beside(process)


def first_line(said: str) -> str:
    """Return the line that a plugin of Nagios says, without the numbers after the bar."""
    lines: Sequence[str] = said.strip().splitlines()
    return lines[0].partition("|")[0].strip()[:MOST_TEXT] if lines else ""


def filled(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word

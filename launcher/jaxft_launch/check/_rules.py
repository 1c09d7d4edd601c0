"""The file of `jaxft launch --health`: reads and checks its rules. docs/health.md documents them."""

import importlib.util
import math
import os
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from jaxft_launch.check._devices import LIBRARIES, METRICS
from jaxft_launch.check._readings import Limits
from jaxft_launch.processes._checks import LaunchError

# A sick machine is found within a minute and a half, and a single bad reading changes nothing.
INTERVAL_S = 30.0
TIMEOUT_S = 10.0
CONSECUTIVE = 3


class Action(StrEnum):
    """What follows if a rule is critical."""

    WARN = "warn"
    DRAIN = "drain"
    KILL = "kill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule, applied to each group.

    Attributes:
        name: different from that of all others.
        source: what is measured, one of SOURCES.
        action: what is done if it is critical.
        interval_s: from one reading to the next.
        timeout_s: how long a reading may take.
        consecutive: how many equal readings in a row change the level.
        limits: for all sources but commands.
        command: the words of a command.
        path: the folder whose disk is meant.
        metric: of a device.
        job: whose step times are compared; empty: the coordinator's only job.
    """

    name: str
    source: str
    action: Action
    interval_s: float = INTERVAL_S
    timeout_s: float = TIMEOUT_S
    consecutive: int = CONSECUTIVE
    limits: Limits
    command: tuple[str, ...] = ()
    path: str = ""
    metric: str = ""
    job: str = ""


COMMON = ("name", "source", "action", "interval_s", "timeout_s", "consecutive")
LIMITS = ("warning", "critical")
# The keys of each source beside the common ones.
SOURCES: Mapping[str, tuple[str, ...]] = {
    "command": ("command",),
    "memory": LIMITS,
    "disk": ("path", *LIMITS),
    "step_time": ("job", *LIMITS),
    "clock": LIMITS,
    "nvml": ("metric", *LIMITS),
    "amdsmi": ("metric", *LIMITS),
}
LOW_IS_BAD = ("memory", "disk")
# They ask the coordinator's HTTP port, and for what.
ASKS_THE_PORT = {"step_time": "step times come", "clock": "its time comes"}


def read_rules(file: Path, *, http: str) -> tuple[Rule, ...]:
    """Return the rules of a file.

    Args:
        file: in TOML, with a table [[rule]] for each rule.
        http: the URL of the coordinator's HTTP port; empty if it is not known.

    Raises:
        LaunchError: the file cannot be read, or a rule is not valid or cannot be checked here.
    """
    try:
        whole = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LaunchError(f"--health {file} cannot be read as TOML: {error}.") from error
    tables = whole.get("rule")
    if list(whole) != ["rule"] or not isinstance(tables, list) or not tables:
        raise LaunchError(
            f"--health {file} has {sorted(whole) or 'nothing'} at its top. Write one table [[rule]] for each rule."
        )
    rules: list[Rule] = []
    for number, table in enumerate(tables, 1):
        try:
            rule = rule_of(table)
            check_here(rule, http=http)
            if rule.name in [one.name for one in rules]:
                raise LaunchError("another rule has the same name.")
        except LaunchError as error:
            name = table.get("name") if isinstance(table, dict) else None
            raise LaunchError(f"--health {file}, rule {number} ({name!r}): {error}") from error
        rules.append(rule)
    return tuple(rules)


def rule_of(table: Any) -> Rule:
    """Return the rule of a table.

    Raises:
        LaunchError: it is not valid.
    """
    if not isinstance(table, dict):
        raise LaunchError(f"write a table [[rule]], not {table!r}.")
    source = _one_of(table, "source", tuple(SOURCES))
    known = (*COMMON, *SOURCES[source])
    if unknown := [key for key in table if key not in known]:
        raise LaunchError(
            f"a rule with source {source!r} has no key {unknown[0]!r}. Its keys: {', '.join(known)}."
        )
    action = Action(_one_of(table, "action", tuple(Action)))
    if source == "clock" and action is not Action.WARN:
        raise LaunchError(
            f"a rule with source 'clock' can only warn, not {action.value}: of two clocks that differ, the "
            'coordinator\'s may be the wrong one, and then all groups would go. Give it action = "warn".'
        )
    return Rule(
        name=_text(table, "name"),
        source=source,
        action=action,
        interval_s=_number(table, "interval_s", INTERVAL_S, least=0.1),
        timeout_s=_number(table, "timeout_s", TIMEOUT_S, least=0.1),
        consecutive=_count(table, "consecutive", CONSECUTIVE),
        limits=_limits(table, source, action),
        command=_command(table) if source == "command" else (),
        path=_text(table, "path") if source == "disk" else "",
        metric=_one_of(table, "metric", METRICS[source]) if source in METRICS else "",
        job=_text(table, "job") if "job" in table else "",
    )


def check_here(rule: Rule, *, http: str) -> None:
    """Raise a LaunchError if a rule cannot be checked on this machine."""
    if rule.source == "command" and "{" not in rule.command[0] and shutil.which(rule.command[0]) is None:
        raise LaunchError(f"there is no program {rule.command[0]!r} to run. Check its path.")
    if rule.source == "disk" and not os.path.exists(rule.path):
        raise LaunchError(f"there is no folder {rule.path!r}. Name one on the disk that is meant.")
    if rule.source in ASKS_THE_PORT and not http:
        raise LaunchError(
            f"{ASKS_THE_PORT[rule.source]} from the coordinator's HTTP port. Start it with --http HOST:PORT, or, if "
            "it runs elsewhere, give its URL in the environment variable JAXFT_HTTP."
        )
    if rule.source in LIBRARIES:
        library = LIBRARIES[rule.source]
        if importlib.util.find_spec(library.module) is None:
            raise LaunchError(f"it needs the Python package {library.module}. Run: {library.remedy}")


def _limits(table: Mapping[str, Any], source: str, action: Action) -> Limits:
    found = {key: _number(table, key, 0.0, least=0.0) for key in LIMITS if key in table}
    limits = Limits(**found, high_is_bad=source not in LOW_IS_BAD)
    if source == "command":
        return limits
    if not found or (limits.critical is None and action is not Action.WARN):
        raise LaunchError(f"a rule with action {action.value!r} needs the limit `critical`, a number.")
    if limits.warning is not None and limits.critical is not None:
        reversed_ = (
            limits.warning > limits.critical if limits.high_is_bad else limits.warning < limits.critical
        )
        if reversed_:
            side = "above" if limits.high_is_bad else "below"
            raise LaunchError(
                f"`critical` must lie {side} `warning`, but they are {limits.critical:g} and {limits.warning:g}."
            )
    return limits


def _command(table: Mapping[str, Any]) -> tuple[str, ...]:
    words = table.get("command")
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise LaunchError(
            f'`command` must be a list of words such as ["check-fabric", "--fast"], not {words!r}.'
        )
    return tuple(words)


def _text(table: Mapping[str, Any], key: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value:
        raise LaunchError(f"`{key}` must be a text that is not empty, not {value!r}.")
    return value


def _one_of(table: Mapping[str, Any], key: str, choices: tuple[str, ...]) -> str:
    value = table.get(key)
    if value not in choices:
        raise LaunchError(f"`{key}` must be one of {', '.join(choices)}, not {value!r}.")
    return str(value)


def _number(table: Mapping[str, Any], key: str, default: float, *, least: float) -> float:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise LaunchError(f"`{key}` must be a number of at least {least:g}, not {value!r}.")
    return float(value)


def _count(table: Mapping[str, Any], key: str, default: int) -> int:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LaunchError(f"`{key}` must be a whole number of at least 1, not {value!r}.")
    return value

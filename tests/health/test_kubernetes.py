"""The rules of docs/health.md that ask Kubernetes run as they are printed, with a stand-in for kubectl."""

import os
import tomllib
from pathlib import Path

import pytest

from jaxft_launch.check._readings import Level
from jaxft_launch.check._rules import rule_of
from jaxft_launch.check._sources import Command, Place
from tests.manual.blocks import ROOT, blocks

# It refuses other arguments than those of the page, and answers with what the test has put into its file.
KUBECTL = """#!/bin/sh
[ "$1 $2 $3 $4" = "get node node-7 -o" ] || { echo "unexpected: $*" >&2; exit 1; }
case $5 in
    'jsonpath={.status.capacity.amd\\.com/gpu} {.status.allocatable.amd\\.com/gpu}') cat "$ANSWERS/counts" ;;
    'jsonpath={.status.conditions[?(@.type=="GPUProblem")].status}') cat "$ANSWERS/condition" ;;
    *) echo "unexpected: $5" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL)
    kubectl.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "NODE_NAME": "node-7",
        "ANSWERS": str(tmp_path),
    }
    return Place(group="group-0", devices=(), environment=environment, folder=tmp_path, http="")


def documented(name: str) -> dict[str, object]:
    """The rule of this name on the page."""
    tables = [
        table
        for block in blocks()
        if block.page == ROOT / "docs/health.md" and block.kind == "toml"
        for table in tomllib.loads(block.text)["rule"]
    ]
    [found] = [table for table in tables if table["name"] == name]
    return found


@pytest.mark.parametrize(
    ("answer", "level", "text"),
    [
        ("8 8", Level.OK, "exit status 0"),
        ("8 7", Level.CRITICAL, "the plug-in offers 7 of 8 devices"),
        ("8 0", Level.CRITICAL, "the plug-in offers 0 of 8 devices"),
        (" ", Level.UNKNOWN, "this node has no such devices:"),
        (None, Level.UNKNOWN, "No such file"),
    ],
)
def test_the_device_plug_in_withdraws_a_device(
    place: Place, answer: str | None, level: Level, text: str
) -> None:
    if answer is not None:
        (place.folder / "counts").write_text(answer)
    reading = Command(rule_of(documented("device plug-in")), place).read()
    assert (reading.level, text in reading.text) == (level, True), reading


@pytest.mark.parametrize(
    ("answer", "level", "text"),
    [
        ("False", Level.OK, "no problem"),
        ("True", Level.CRITICAL, "the node has the condition GPUProblem"),
        ("Unknown", Level.UNKNOWN, "is not known: 'Unknown'"),
        ("", Level.UNKNOWN, "is not known: ''"),
        (None, Level.UNKNOWN, "No such file"),
    ],
)
def test_a_condition_of_the_node(place: Place, answer: str | None, level: Level, text: str) -> None:
    if answer is not None:
        (place.folder / "condition").write_text(answer)
    reading = Command(rule_of(documented("node condition")), place).read()
    assert (reading.level, text in reading.text) == (level, True), reading

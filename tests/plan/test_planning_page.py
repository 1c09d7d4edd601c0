"""docs/planning.md: each number comes from the command."""

import json
import re
import shlex
from pathlib import Path

import pytest

from jaxft_launch.__main__ import main
from jaxft_launch.plan.forecast import RESTART, exact_name
from jaxft_launch.plan.plan import figure, percent

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```sh\njaxft (plan [^\n]*)\n```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
SIZES = re.findall(r"^\| (\d+e9) \| (\d+) \| (\d+) \| (\d+) \| (.*) \|$", PAGE, re.MULTILINE)
COLUMNS = (
    "moved each way a step",
    "exchange",
    "processor a step",
    "heal",
    "host memory, donor",
    "host memory, log",
    "host memory, joiner",
    "disk",
)


def output(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("command", "shown"), EXAMPLES)
def test_an_example_shows_lines_of_its_command(
    command: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [" ".join(line.split()) for line in output(shlex.split(command), capsys).splitlines()]
    for line in shown.strip().splitlines():
        wanted = " ".join(line.split())
        assert any(each == wanted or each.startswith(f"{wanted} ") for each in lines), wanted


@pytest.mark.parametrize(("params", "groups", "devices", "step_s", "cells"), SIZES)
def test_a_size_has_the_numbers_of_the_command(
    params: str, groups: str, devices: str, step_s: str, cells: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--params", params, "--groups", groups, "--devices-per-group", devices, "--step-s", step_s]
    found = json.loads(output(["plan", *words, "--json"], capsys))
    needs = {each["name"]: figure(each["value"]) for each in found["needs"]}
    shares = {each["name"]: percent(each["time"]) for each in found["outcomes"]}
    assert cells.split(" | ") == [*(needs[name] for name in COLUMNS), shares[RESTART], shares[exact_name(0)]]


def test_the_page_has_three_examples_and_three_sizes() -> None:
    assert (len(EXAMPLES), len(SIZES)) == (3, 3)

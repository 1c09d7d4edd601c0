"""Edits by line number, the table that they lead to, and the Python that runs a loop."""

import sys
from pathlib import Path

import pytest

from tests.loops.loop import Edit, Loop, apply, loops, parse, python_of
from tests.loops.run import Outcome, interpreter, prepare
from tests.loops.table import BEGIN, END, HEAD, PAGE, row, rows, write_table

WIDTH = 110  # of a line that counts as one
LINES = ["one", "two", "three", "", "five"]
MODULE = {"title": "t", "package": "p==1.2", "python": "99.0", "path": "p/train.py", "needs": ""}


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("2c\nTWO\n.\n", ["one", "TWO", "three", "", "five"]),
        ("2,3c\nTWO\n.\n", ["one", "TWO", "", "five"]),
        ("0a\nzero\n.\n5a\nsix\n\n.\n", ["zero", *LINES, "six", ""]),
        ("1d\n3,4d\n", ["two", "five"]),
        ("2,5>2\n", ["one", "  two", "  three", "", "  five"]),
        # Numbers refer to the original, in any order; the replacement of an indented line is taken as it is.
        ("5d\n1c\nONE\nand\n.\n1,3>4\n2c\n  TWO\n.\n", ["ONE", "and", "  TWO", "    three", ""]),
    ],
)
def test_edits_change_the_lines_that_they_name(script: str, expected: list[str]) -> None:
    assert apply(list(parse(script)), LINES) == expected


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("2x\n", "'2x' is no command"),
        ("TWO\n.\n", "'TWO' is no command"),
        ("2c\nTWO\n", "no dot ends the lines of '2c'"),
    ],
)
def test_a_script_that_cannot_be_read_is_an_error(script: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        list(parse(script))


def test_sizes_indents_and_blank_lines_do_not_count() -> None:
    ours = tuple(parse("2,3c\nTWO\n.\n5a\nsix\n\nseven\n.\n1d\n1,5>2\n"))
    loop = Loop("one", {}, sizes=(Edit(1, 1, "c", ("ONE", "and")),), ours=ours)
    assert (loop.added, loop.removed) == (3, 3)


def test_the_code_of_a_notebook() -> None:
    notebook = """{"cells": [{"cell_type": "markdown", "source": ["# a"]},
        {"cell_type": "code", "source": ["import jax\\n", "!pip install x"]},
        {"cell_type": "code", "source": ["a = 1\\n"]}]}"""
    assert python_of(notebook, "a.ipynb") == "import jax\n# !pip install x\n\na = 1\n"
    assert python_of("%a\n", "a.py") == "%a\n"


def test_no_loop_takes_more_lines_than_promised() -> None:
    larger = {loop.name for loop in loops() if loop.goal != 10}
    assert larger == {
        "equinox_dcgan",
        "flax_gemma",
        "haiku_gan",
        "nanodo",
        "optax_dpsgd",
        "tunix_grpo",
        "tunix_lora",
    }
    assert {loop.name: loop.added for loop in loops() if loop.added > min(loop.goal, 20)} == {}
    lines = [line for loop in loops() for edit in loop.ours for line in edit.lines]
    assert [line for line in lines if len(line) > WIDTH] == []


def test_every_loop_has_a_row_whose_lines_are_those_of_its_edits() -> None:
    table = rows(PAGE.read_text())
    assert {loop.header["title"] for loop in loops()} == set(table)
    for loop in loops():
        assert f" | +{loop.added} -{loop.removed} | " in table[loop.header["title"]], loop.name
        assert f"]({loop.url}) |" in table[loop.header["title"]]


def test_at_least_ten_loops_end_with_the_same_bits() -> None:
    table = rows(PAGE.read_text())
    assert all(line.endswith("| the same |") for line in table.values())
    assert len(table) >= 10


def test_a_row_is_written_beside_the_others(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}{HEAD}| a | old |\n| c | kept |\n{END}after\n")
    write_table({"b": "| b | new |", "a": "| a | newer |"}, page)
    assert page.read_text() == f"before\n{BEGIN}{HEAD}| a | newer |\n| b | new |\n| c | kept |\n{END}after\n"


def test_a_row_says_when_bits_differ() -> None:
    loop = Loop("x", {"title": "t", "repo": "o/r", "commit": "c", "path": "a/b.py"}, (), ())
    assert row(loop, Outcome(2, 80, same_bits=False, problems="")) == (
        "| t | [b.py](https://github.com/o/r/blob/c/a/b.py) | +0 -0 | 2 | 80 | **other** |"
    )


def test_a_loop_of_a_repository_runs_in_this_environment() -> None:
    assert interpreter(Loop("x", {"path": "a.py"}, (), ()), "no-such-python") == Path(sys.executable)


def test_a_python_that_is_too_old_is_said_with_what_to_do() -> None:
    with pytest.raises(SystemExit, match=r"p==1.2 needs Python 99.0.*there is no no-such-python.*`--newer`"):
        interpreter(Loop("x", MODULE, (), ()), "no-such-python")


def test_the_source_of_a_package_is_that_of_its_environment(tmp_path: Path) -> None:
    module = tmp_path / "lib" / "python3.12" / "site-packages" / "p" / "train.py"
    module.parent.mkdir(parents=True)
    module.write_text("one\ntwo\n")
    loop = Loop("x", MODULE, (), tuple(parse("2c\nTWO\n.\n")))
    program = prepare(loop, tmp_path / "bin" / "python", cache=tmp_path, folder=tmp_path / "folder")
    assert program.read_text() == "one\nTWO\n"

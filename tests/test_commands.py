"""Commands are lists of words, never one text: a path may contain a space wherever a newcomer may clone."""

import ast
import re
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import patience

ROOT = Path(__file__).parent.parent
FOLDERS = ("jaxft", "coordinator", "tests", "benchmarks", "examples", "lab", "deploy")
STARTERS = {"Popen", "run", "call", "check_call", "check_output"}
SHELLS = {"system", "popen", "getoutput", "getstatusoutput", "create_subprocess_shell"}


def problems(source: str) -> Iterator[tuple[int, str]]:
    """What would split a path at a space, by line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            owner = getattr(getattr(node.func, "value", None), "id", "")
            if any(word.arg == "shell" for word in node.keywords) or (owner == "os" and name in SHELLS):
                yield node.lineno, "a shell splits a text into words"
            if name in SHELLS - {"system", "popen"}:
                yield node.lineno, "a shell splits a text into words"
            if (
                owner == "subprocess"
                and name in STARTERS
                and isinstance(node.args[0], ast.JoinedStr | ast.Constant)
            ):
                yield node.lineno, "a command is a list of words"
        # In the text of a program, too, which is what failed.
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.search(r"argv\[\d+\]\.split\(", node.value):
                yield node.lineno, "an argument is split at spaces"
        if isinstance(node, ast.JoinedStr) and re.match(
            r"[^{]*\b(mount|sh -c|cp|rm|mv|cd)\s.*\{", ast.unparse(node)[2:]
        ):
            yield node.lineno, "a path in the text of a shell"


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_command_is_split_at_spaces(folder: str) -> None:
    paths = [
        path for path in (ROOT / folder).rglob("*.py") if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
    ]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in paths
        if path != Path(__file__)
        for line, what in problems(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "subprocess.run('python x.py', shell=True)",
        "subprocess.run(f'python {path}')",
        "os.system('true')",
        'script = "words = sys.argv[2].split()"',
        "(f'mount -t tmpfs none {folder} && true',)",
    ],
)
def test_the_guard_finds_what_it_should(source: str) -> None:
    assert list(problems(source))


@pytest.mark.long
def test_make_works_in_a_folder_with_a_space(tmp_path: Path) -> None:
    """As far as make itself goes: each program is found, and gets its arguments as words."""
    clone = tmp_path / "some dir" / "a clone"
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / "coordinator").mkdir()
    (clone / "launcher").mkdir()
    (clone / "protocol").mkdir()
    for name in (
        "Makefile",
        *(f"{each}pyproject.toml" for each in ("", "coordinator/", "launcher/", "protocol/")),
    ):
        (clone / name).write_text((ROOT / name).read_text())
    (clone / ".venv" / ".installed").touch()
    for name in ("jaxft", "pytest", "python", "ruff", "pyright", "lint-imports"):
        program = clone / ".venv" / "bin" / name
        program.write_text('#!/bin/sh\nprintf "<%s>" "$0" "$@"\necho\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    command = ["make", "-s", "-C", str(clone), "demo", "chaos", "test", "storm", "simulate", "lint", "bench"]
    done = patience.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert "<.venv/bin/python><-m><lab><demo>" in done.stdout
    assert "<.venv/bin/pytest><-m><storm><-n><0>" in done.stdout

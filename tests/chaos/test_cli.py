"""The commands `jaxft` and `python -m lab`: their arguments, errors and exit statuses."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxft._version import __version__
from jaxft_launch import __main__ as jaxft
from jaxft_launch.processes._checks import LaunchError, check_command, check_installed, check_new_folder
from jaxft_launch.storm import chaos
from jaxft_launch.storm.chaos import ChaosOptions
from jaxft_launch.supervise import launch
from jaxft_launch.supervise._options import LaunchOptions
from lab import __main__ as lab
from lab._examples import check_example
from lab.chaos import LabChaosOptions
from lab.demo import DemoOptions


def exit_code(arguments: Sequence[str], main: Callable[[Sequence[str]], None] = lab.main) -> int:
    with pytest.raises(SystemExit) as info:
        main(arguments)
    code = info.value.code
    return 0 if code is None else int(code)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    jaxft.main(["--version"])
    assert capsys.readouterr().out == f"jaxft {__version__}\n"
    jaxft.main(["--help"])
    text = capsys.readouterr().out
    for command in ("launch", "chaos", "status", "drain", "doctor", "check"):
        assert f"\n{command} " in text


@pytest.mark.parametrize("arguments", [[], ["demo"], ["storm", "--", "python"]])
def test_no_command_or_an_unknown_one_is_an_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(arguments, jaxft.main) == 2
    assert "usage: jaxft launch" in capsys.readouterr().err
    assert exit_code([]) == exit_code(["demonstrate"]) == 2


@pytest.mark.parametrize(
    ("where", "name", "main", "given", "wanted"),
    [
        (chaos, "run_chaos", jaxft.main, ["chaos", "--kills", "2"], ChaosOptions(kills=2)),
        (launch, "run_launch", jaxft.main, ["launch", "--nproc", "2"], LaunchOptions(nproc=2)),
        (lab, "run_chaos", lab.main, ["chaos", "--example", "llama3"], LabChaosOptions(example="llama3")),
        (lab, "run_demo", lab.main, ["demo", "--keep", "v"], DemoOptions(keep=Path("v"))),
    ],
)
def test_flags_reach_a_command_and_its_status_is_ours(
    where: Any, name: str, main: Any, given: list[str], wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands behind two dashes is the program."""
    seen: list[tuple[Any, ...]] = []

    def run(*arguments: Any) -> int:
        seen.append(arguments)
        return 75

    monkeypatch.setattr(where, name, run)
    program = ["python", "train.py", "--kills", "7", "--", "a b"] if main is jaxft.main else []
    assert exit_code([*given, *(["--", *program] if program else [])], main) == 75
    assert seen == [(wanted, program) if program else (wanted,)]


def test_an_error_is_one_text_on_stderr_and_so_is_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(options: DemoOptions) -> int:
        raise LaunchError("it does not run here") if options.nproc == 1 else KeyboardInterrupt

    monkeypatch.setattr(lab, "run_demo", run)
    assert exit_code(["demo"]) == 1
    assert capsys.readouterr() == ("", "jaxft: it does not run here\n")
    assert exit_code(["demo", "--nproc", "2"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("train.py", "'train.py' is no command. Use `python train.py`."),
        ("./a b.py", "'./a b.py' is no command. Use `python './a b.py'`."),
        ("run.sh", "'run.sh' is no command. Use `chmod +x run.sh`."),
        ("ready.sh", "'ready.sh' is no command. Use `./ready.sh`."),
        ("folder", "'folder' is a folder. Name a program in it."),
        ("./train", "There is no program './train' to run. Check its path."),
        (None, "Name the program to train, after two dashes: jaxft launch -- python my_train.py"),
    ],
)
def test_what_cannot_be_run_is_told_how(
    word: str | None, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train.py", "a b.py", "run.sh"):
        (tmp_path / name).touch(0o644)
    (tmp_path / "ready.sh").touch(0o755)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError) as caught:
        check_command(() if word is None else (word,), command="jaxft launch")
    assert str(caught.value) == text


@pytest.mark.parametrize("words", ["python3 -uB", "python -u /dev/stdin 3", "python"])
def test_a_program_of_the_standard_input_is_refused(words: str) -> None:
    with pytest.raises(LaunchError, match=f"'{words}' would read its program from the standard input"):
        check_command(words.split(), command="jaxft launch")


def test_programs_of_python_that_are_named(tmp_path: Path) -> None:
    script = str(tmp_path / "train.py")
    for words in ([script], ["-u", script, "-"], ["-m", "train"], ["-c", "pass"], ["-X", "dev", script]):
        check_command((sys.executable, *words), command="jaxft launch")


def test_a_current_folder_that_was_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    with pytest.raises(LaunchError, match="The current folder does not exist any more"):
        check_command(("true",), command="jaxft launch")


@pytest.mark.parametrize("words", [["--folder", ""], ["--folder="]])
def test_an_empty_path_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """As of a variable that is not set: it would be the current folder."""
    assert exit_code(["launch", *words, "--", "true"], jaxft.main) == 2
    assert capsys.readouterr().err.startswith("jaxft: --folder has an empty value, as from a shell variable")


def test_a_missing_package_is_told_with_its_remedy() -> None:
    with pytest.raises(LaunchError, match=r'needs no_such_package, .* pip install -e "\.\[llama3\]"'):
        check_example(("rich", "no_such_package"))
    with pytest.raises(LaunchError, match=r"needs no_such_package, .*\. Run: pip install it"):
        check_installed(("no_such_package",), remedy="pip install it")


def test_only_a_new_folder_is_kept(tmp_path: Path) -> None:
    check_new_folder(tmp_path)
    check_new_folder(tmp_path / "new")
    (tmp_path / "file").touch()
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(LaunchError, match="not an empty folder"):
            check_new_folder(taken)

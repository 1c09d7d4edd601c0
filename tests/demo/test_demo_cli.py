import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import jaxft
from jaxft._version import __version__
from jaxft_launch import __main__ as _cli
from jaxft_launch.processes._checks import LaunchError, check_command, check_installed, check_new_folder
from jaxft_launch.storm import chaos
from jaxft_launch.storm.chaos import ChaosOptions
from jaxft_launch.supervise import launch
from jaxft_launch.supervise._options import LaunchOptions
from lab import __main__ as lab
from lab._examples import check_example
from lab.chaos import LabChaosOptions
from lab.demo import NEEDED, DemoOptions

# The code of the command `jaxft`. The library imports only the agent of it, which a storm needs in each group.
COMMANDS = ("_chaos", "_health", "_launch", "_operate")
# What tells a storm and a supervisor about a group, from within its processes.
LEFT_IN = {
    "jaxft._supervised._agent.Agent",
    "jaxft._supervised._beacon.Beacon",
    "jaxft._supervised._beacon.beacon_of_process",
}


def exit_code(arguments: Sequence[str], main: Callable[[Sequence[str]], None] = lab.main) -> int:
    with pytest.raises(SystemExit) as info:
        main(arguments)
    code = info.value.code
    return 0 if code is None else int(code)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    _cli.main(["--version"])
    assert capsys.readouterr().out == f"jaxft {__version__}\n"


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    _cli.main(["--help"])
    text = capsys.readouterr().out
    assert "jaxft launch [options] -- program" in text
    assert "jaxft chaos [options] -- program" in text
    assert "--version" in text
    assert exit_code(["--help"]) == 0
    text = capsys.readouterr().out
    assert "demo" in text
    assert "chaos" in text


@pytest.mark.parametrize("arguments", [[], ["demo"], ["storm", "--", "python"]])
def test_no_command_or_an_unknown_one_is_an_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(arguments, _cli.main) == 2
    assert "usage: jaxft launch" in capsys.readouterr().err


def test_what_stands_behind_two_dashes_is_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[ChaosOptions, list[str]]] = []

    def run(options: ChaosOptions, words: list[str]) -> int:
        seen.append((options, words))
        return 1

    monkeypatch.setattr(chaos, "run_chaos", run)
    words = ["python", "train.py", "--kills", "7", "--", "a b"]
    assert exit_code(["chaos", "--kills", "2", "--phases", "vote", "--", *words], _cli.main) == 1
    assert seen == [(ChaosOptions(kills=2, phases="vote"), words)]


def test_launch_gets_its_program_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[LaunchOptions, list[str]]] = []

    def run(options: LaunchOptions, words: list[str]) -> int:
        seen.append((options, words))
        return 75

    monkeypatch.setattr(launch, "run_launch", run)
    words = ["python", "train.py", "--groups", "7", "--", "a b"]
    given = ["launch", "--groups", "3", "--nproc", "2", "--no-warm", "--", *words]
    assert exit_code(given, _cli.main) == 75
    assert seen == [(LaunchOptions(groups=3, nproc=2, warm=False), words)]


def test_help_of_launch_lists_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["launch", "--help"], _cli.main) == 0
    text = capsys.readouterr().out
    for word in ("--groups", "--group ", "--nproc", "--spares", "--deadlines", "--folder", "Exit status 0"):
        assert word in text


def test_help_of_chaos_says_how_to_name_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["chaos", "--help"], _cli.main) == 0
    text = capsys.readouterr().out
    for word in ("--kills", "--groups", "--seed", "--minutes", "--json", "--keep", "-- python my_train.py"):
        assert word in text


def test_a_program_that_is_missing_is_an_error() -> None:
    with pytest.raises(LaunchError, match=r"after two dashes: jaxft chaos -- python my_train\.py"):
        check_command((), command="jaxft chaos")
    with pytest.raises(LaunchError, match="There is no program 'no_such_program' to run"):
        check_command(("no_such_program",), command="jaxft chaos")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("train.py", "'train.py' is no command. Use `python train.py`."),
        ("./a b.py", "'./a b.py' is no command. Use `python './a b.py'`."),
        ("run.sh", "'run.sh' is no command. Use `chmod +x run.sh`."),
        ("ready.sh", "'ready.sh' is no command. Use `./ready.sh`."),
        ("./run.sh", "'./run.sh' is no command. Use `chmod +x ./run.sh`."),
        ("folder", "'folder' is a folder. Name a program in it."),
        ("./train", "There is no program './train' to run. Check its path."),
    ],
)
def test_what_is_there_and_cannot_be_run_is_told_how(
    word: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its path is right: not to be sent to check it."""
    for name in ("train.py", "a b.py", "run.sh"):
        (tmp_path / name).touch(0o644)
    (tmp_path / "ready.sh").touch(0o755)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError) as caught:
        check_command((word,), command="jaxft launch")
    assert str(caught.value) == said


def test_programs_of_python_that_are_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    for words in (
        [script],
        ["-u", script, "-"],
        ["-m", "train"],
        ["-c", "pass"],
        ["-X", "dev", script],
        ["--version"],
    ):
        check_command((sys.executable, *map(str, words)), command="jaxft launch")


def test_help_of_the_demo_lists_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["demo", "--help"]) == 0
    text = capsys.readouterr().out
    for flag in ("--steps", "--kills", "--seed", "--json", "--keep"):
        assert flag in text


def test_help_of_chaos_lists_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["chaos", "--help"]) == 0
    text = capsys.readouterr().out
    for flag in (
        "--kills",
        "--groups",
        "--seed",
        "--example",
        "--steps",
        "--only",
        "--phases",
        "--json",
        "--keep",
    ):
        assert flag in text


def test_the_flags_reach_chaos_and_its_status_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[LabChaosOptions] = []

    def run(options: LabChaosOptions) -> int:
        seen.append(options)
        return 1

    monkeypatch.setattr(lab, "run_chaos", run)
    assert exit_code(["chaos", "--kills", "7", "--example", "llama3", "--phases", "vote,boot"]) == 1
    assert seen == [LabChaosOptions(kills=7, example="llama3", phases="vote,boot")]


def test_no_command_of_the_lab_is_an_error() -> None:
    assert exit_code([]) == 2
    assert exit_code(["demonstrate"]) == 2


def test_the_flags_reach_the_demo_and_its_status_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DemoOptions] = []

    def run(options: DemoOptions) -> int:
        seen.append(options)
        return 1

    monkeypatch.setattr(lab, "run_demo", run)
    assert exit_code(["demo", "--steps", "7", "--kills", "2", "--seed", "3", "--json", "v.json"]) == 1
    assert seen == [DemoOptions(steps=7, kills=2, seed=3, json=Path("v.json"))]


def test_a_failure_is_one_text_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(options: DemoOptions) -> int:
        raise LaunchError("it does not run here")

    monkeypatch.setattr(lab, "run_demo", run)
    assert exit_code(["demo"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "jaxft: it does not run here\n"
    assert captured.out == ""


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(options: DemoOptions) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(lab, "run_demo", run)
    assert exit_code(["demo"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--steps", "0"], ["--kills", "-1"]])
def test_numbers_that_make_no_sense(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["demo", *flags]) == 1
    assert "--steps must be 1 or more" in capsys.readouterr().err


def test_without_the_extra_the_demo_says_how_to_install_it() -> None:
    check_example(NEEDED)
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


def test_the_library_imports_neither_its_command_nor_what_only_that_needs() -> None:
    """Read from the source, because importing all of jaxft in a new process takes seconds."""
    folder = Path(jaxft.__file__).parent
    commands = {"_cli.py", "__main__.py"}
    library = [
        path
        for path in folder.rglob("*.py")
        if path.name not in commands and path.parent.name not in COMMANDS
    ]
    assert folder / "__init__.py" in library
    imported = {name for path in library for name in imports_of(path)}
    assert "jax" in imported
    heavy = (
        *(f"jaxft.{name}" for name in COMMANDS),
        "jaxft_launch.__main__",
        "rich",
        "tyro",
        "flax",
        "optax",
    )
    assert {name for name in imported if name.startswith(heavy)} == LEFT_IN


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names):
                yield from (f"{module}.{alias.name}" for alias in names)

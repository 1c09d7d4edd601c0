import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import jaxft
from jaxft import _cli
from jaxft._chaos.chaos import ChaosOptions
from jaxft._demo.demo import NEEDED, DemoOptions
from jaxft._launch._checks import LaunchError, check_installed, check_new_folder, find_clone
from jaxft._launch._job import TRAINER
from jaxft._version import __version__

# The packages behind the command `jaxft`.
COMMANDS = ("_chaos", "_demo", "_launch")


def exit_code(arguments: Sequence[str]) -> int:
    with pytest.raises(SystemExit) as info:
        _cli.main(arguments)
    code = info.value.code
    return 0 if code is None else int(code)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    _cli.main(["--version"])
    assert capsys.readouterr().out == f"jaxft {__version__}\n"


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["--help"]) == 0
    text = capsys.readouterr().out
    assert "demo" in text
    assert "chaos" in text
    assert "--version" in text


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
    seen: list[ChaosOptions] = []

    def run(options: ChaosOptions) -> int:
        seen.append(options)
        return 1

    monkeypatch.setattr(_cli, "run_chaos", run)
    assert exit_code(["chaos", "--kills", "7", "--example", "llama3", "--phases", "vote,boot"]) == 1
    assert seen == [ChaosOptions(kills=7, example="llama3", phases="vote,boot")]


def test_no_command_or_an_unknown_one_is_an_error() -> None:
    assert exit_code([]) == 2
    assert exit_code(["demonstrate"]) == 2


def test_the_flags_reach_the_demo_and_its_status_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DemoOptions] = []

    def run(options: DemoOptions) -> int:
        seen.append(options)
        return 1

    monkeypatch.setattr(_cli, "run_demo", run)
    assert exit_code(["demo", "--steps", "7", "--kills", "2", "--seed", "3", "--json", "v.json"]) == 1
    assert seen == [DemoOptions(steps=7, kills=2, seed=3, json=Path("v.json"))]


def test_a_failure_is_one_text_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(options: DemoOptions) -> int:
        raise LaunchError("it does not run here")

    monkeypatch.setattr(_cli, "run_demo", run)
    assert exit_code(["demo"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "jaxft: it does not run here\n"
    assert captured.out == ""


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(options: DemoOptions) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(_cli, "run_demo", run)
    assert exit_code(["demo"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--steps", "0"], ["--kills", "-1"]])
def test_numbers_that_make_no_sense(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["demo", *flags]) == 1
    assert "--steps must be 1 or more" in capsys.readouterr().err


def test_outside_a_clone_the_demo_says_where_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="Clone the repository, and run this in it"):
        find_clone(TRAINER[2], (tmp_path,))


def test_the_current_folder_may_be_the_clone(tmp_path: Path) -> None:
    trainer = tmp_path / "clone" / "examples" / "llama3" / "train.py"
    trainer.parent.mkdir(parents=True)
    trainer.touch()
    assert find_clone(TRAINER[2], (tmp_path, tmp_path / "clone")) == tmp_path / "clone"


def test_this_is_a_clone() -> None:
    assert (find_clone(TRAINER[2]) / "examples" / "llama3").is_dir()


def test_without_the_extra_the_demo_says_how_to_install_it() -> None:
    check_installed(NEEDED)
    with pytest.raises(LaunchError, match=r'needs no_such_package, .* pip install "jaxft\[llama3\]"'):
        check_installed(("rich", "no_such_package"))


def test_only_a_new_folder_is_kept(tmp_path: Path) -> None:
    check_new_folder(tmp_path)
    check_new_folder(tmp_path / "new")
    (tmp_path / "file").touch()
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(LaunchError, match="not an empty folder"):
            check_new_folder(taken)


def test_the_library_imports_neither_the_demo_nor_what_only_the_demo_needs() -> None:
    """Read from the source: to import jaxft in a fresh process takes seconds."""
    folder = Path(jaxft.__file__).parent
    library = [
        path for path in folder.rglob("*.py") if path.name != "_cli.py" and path.parent.name not in COMMANDS
    ]
    assert folder / "__init__.py" in library
    imported = {name for path in library for name in imports_of(path)}
    assert "jax" in imported
    heavy = (*(f"jaxft.{name}" for name in COMMANDS), "jaxft._cli", "rich", "tyro", "flax", "optax")
    assert [name for name in imported if name.startswith(heavy)] == []


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names):
                yield from (f"{module}.{alias.name}" for alias in names)

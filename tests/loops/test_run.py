"""Which Python runs a loop, and where the source of one that is a module of a package comes from."""

import sys
from pathlib import Path

import pytest

from tests.loops.loop import Loop, parse
from tests.loops.run import interpreter, prepare

MODULE = {"title": "t", "package": "p==1.2", "python": "99.0", "path": "p/train.py", "needs": ""}


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

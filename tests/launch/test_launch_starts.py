"""What a launch refuses before it starts anything, whose folder it is, and what the groups are given."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests import patience
from tests.launch.launches import FAKE, HERE, NOWHERE, fakes, launch, launch_command

pytestmark = pytest.mark.processes
ABSOLUTE = os.pathsep.join(str(HERE.parents[1] / name) for name in ("", "protocol", "coordinator"))


def test_one_group_of_an_array(folder: Path) -> None:
    with fakes(folder, "--group", "7", lives=("say:{group} exit:0",)) as running:
        assert running.status() == 0, running.text()
    assert "[group-7] group-7" in running.text()


@pytest.mark.parametrize(
    ("words", "program", "said"),
    [
        (["--group", "1"], ["true"], "--group starts one group of a job, so it needs the job's coordinator"),
        (
            ["--http", "localhost:1", "--coordinator", "head:7"],
            ["true"],
            "--http is for a coordinator that the launcher starts, but the job's coordinator is head:7",
        ),
        ([], [], "Name the program to train, after two dashes: jaxft launch -- python my_train.py"),
        ([], ["no-such-program"], "There is no program 'no-such-program' to run"),
        (["--deadlines", "bake=1"], ["true"], "there is no phase 'bake'"),
        (
            [],
            ["python", "-"],
            "'python -' would read its program from the standard input, which no group has",
        ),
        ([], ["python3", "-uB"], "'python3 -uB' would read its program from the standard input"),
        ([], ["python", "-u", "/dev/stdin", "3"], "'python -u /dev/stdin 3' would read its program from the"),
    ],
)
def test_what_cannot_run_is_said_before_anything_starts(
    folder: Path, words: list[str], program: list[str], said: str
) -> None:
    with launch(folder, *words, program=tuple(program)) as running:
        assert running.status() == 1
    assert re.search(re.escape(said), running.text())
    assert not folder.exists()


@pytest.mark.parametrize("given", [None, "7"])
def test_groups_agree_on_the_order_of_a_set(given: str | None, folder: Path, tmp_path: Path) -> None:
    """A step that goes through a set of names would be another program in each of them."""
    program = tmp_path / "program.py"
    program.write_text("print('hash', hash('a'))")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environment |= {"PYTHONPATH": ABSOLUTE} | ({} if given is None else {"PYTHONHASHSEED": given})
    command = [sys.executable, "-m", "jaxft_launch", "launch", "--groups", "2", "--folder", str(folder)]
    command += [*NOWHERE, "--", "python", str(program)]
    ended = patience.run(command, env=environment, capture_output=True, text=True)
    seed = {"PYTHONHASHSEED": given or "0"}
    alone = patience.run([sys.executable, str(program)], env=seed, capture_output=True, text=True)
    assert re.findall(r"hash -?\d+", ended.stdout + ended.stderr) == [alone.stdout.strip()] * 2


def test_an_empty_path_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """As of a variable that is not set. It would be the current folder."""
    for words in (["--folder", ""], ["--folder="]):
        command = [sys.executable, "-m", "jaxft_launch", "launch", *words, "--", "true"]
        here = os.environ | {"PYTHONPATH": ABSOLUTE}
        ended = patience.run(command, cwd=tmp_path, env=here, capture_output=True, text=True)
        assert ended.returncode == 2
        assert ended.stderr.startswith(
            "jaxft: --folder has an empty value, as from a shell variable that is not set"
        )
    assert not list(tmp_path.iterdir())


def test_a_second_launch_in_a_folder_is_refused_before_it_changes_anything(folder: Path) -> None:
    """Their logs and events would be mixed, and the second coordinator would stand by without a word."""
    lives = ("made:up gate:go exit:0",)
    with launch(folder, "--no-warm", program=(*FAKE, *lives)) as first:
        first.until_file("up")
        before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        command = launch_command(folder, "--groups", "2", "--no-warm", program=(*FAKE, *lives))
        second = patience.run(command, capture_output=True, text=True)
        after = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        (folder / "go").touch()
        assert first.status() == 0, first.text()
    assert second.returncode == 75
    assert second.stdout == ""
    assert second.stderr == (
        f"jaxft: Another `jaxft launch` runs group-0 in --folder {folder}: name another folder, or end that launch "
        "first.\n"
    )
    assert after == before


def test_a_folder_is_free_again_once_its_launcher_was_killed(folder: Path) -> None:
    with fakes(folder, lives=("made:up mute",)) as running:
        running.until_file("up")
        running.process.kill()
        running.process.wait()
        with fakes(folder, lives=("exit:0",)) as again:
            assert again.status() == 0, again.text()


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        (("--group", "0"), ("--group", "1"), 0),
        (("--group", "0"), ("--group", "0"), 75),
        (("--groups", "2"), ("--group", "1"), 75),
        (("--group", "1"), ("--groups", "2"), 75),
    ],
)
def test_launches_of_different_groups_may_share_a_folder(
    folder: Path, first: tuple[str, ...], second: tuple[str, ...], status: int
) -> None:
    """As those of a Slurm array. On NFS a lock counts for all hosts."""
    with fakes(folder, *first, lives=("made:up-{group} gate:go exit:0",)) as running:
        running.until_file(f"up-group-{'1' if '1' in first else '0'}")
        with fakes(folder, *second, lives=("exit:0",)) as beside:
            assert beside.status() == status, beside.text()
        assert running.process.poll() is None


def test_the_nodes_of_a_group_may_share_a_folder(folder: Path) -> None:
    words = ("--group", "0", "--nodes", "2", "--meet", "localhost:1", "--node")
    with fakes(folder, *words, "0", lives=("made:up gate:go exit:0",)) as running:
        running.until_file("up")
        for node, status in (("1", 0), ("0", 75)):
            with fakes(folder, *words, node, lives=("exit:0",)) as beside:
                assert beside.status() == status, beside.text()


def test_the_rank_of_another_node_is_named(folder: Path) -> None:
    words = ("--group", "0", "--nodes", "2", "--meet", "localhost:1", "--node", "1", "--max-restarts", "0")
    with fakes(folder, *words, lives=("exit:75",)) as running:
        assert running.status() == 75, running.text()
    assert "group-0, rank 1 (pid" in running.text()


def test_a_coordinator_that_cannot_be_started_is_an_error_without_a_traceback(folder: Path) -> None:
    (folder / "coordinator.log").mkdir(parents=True)
    with launch(folder, program=("true",)) as running:
        assert running.status() == 1
    log = f"{folder}/coordinator.log"
    assert (
        f"jaxft: The coordinator cannot be started: [Errno 21] Is a directory: '{log}'.\n" in running.text()
    )
    assert "Traceback" not in running.text()


@pytest.mark.parametrize("command", ["launch", "chaos"])
def test_a_current_folder_that_was_removed_is_said(tmp_path: Path, command: str) -> None:
    here = tmp_path / "here"
    here.mkdir()
    words = [
        "sh",
        "-c",
        'rmdir "$PWD"; exec "$@"',
        "sh",
        sys.executable,
        "-m",
        "jaxft_launch.__main__",
        command,
        "--",
        "true",
    ]
    ended = patience.run(
        words, capture_output=True, text=True, cwd=here, env={**os.environ, "PYTHONPATH": ABSOLUTE}
    )
    assert ended.returncode == 1
    assert (
        ended.stderr == "jaxft: The current folder does not exist any more. Change to one that does: cd ...\n"
    )


@pytest.mark.parametrize(
    ("first", "why"),
    [("#!/bin/sh\r\n", "No such file or directory"), ("true\n", "Exec format error")],
)
def test_a_script_that_cannot_be_run_says_why(folder: Path, tmp_path: Path, first: str, why: str) -> None:
    """Such as one with the line ends of Windows: the kernel finds no interpreter of that name."""
    script = tmp_path / "train"
    script.write_bytes(first.encode())
    script.chmod(0o755)
    with launch(folder, *NOWHERE, "--max-restarts", "0", program=(str(script),)) as running:
        assert running.status() == 1
    assert (folder / "group-0.0.log").read_text() == (
        f"jaxft cannot run {str(script)!r}: {why}. The first line of a script must name a program that is there, and "
        "end as on Unix.\n"
    )


def test_a_machine_without_a_folder_for_temporary_files_is_told_what_to_do(folder: Path) -> None:
    """As in a container whose file system cannot be written, but for one volume. No file may have a byte here."""
    limited = "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); os.execv(sys.argv[1], sys.argv[1:])"
    python = (sys.executable, "-c", f"import os, resource, sys; {limited}")
    command = [*python, *launch_command(folder, *NOWHERE, program=("true",))]
    ended = patience.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "jaxft: There is no folder for temporary files: " in ended.stderr
    assert ended.stderr.endswith(". Set TMPDIR to one on this machine.\n")


@pytest.mark.parametrize("made", ["run", "run/events.jsonl/"])
def test_a_folder_that_cannot_be_used_is_named(folder: Path, made: str) -> None:
    path = folder.parent / made
    if made.endswith("/"):
        path.mkdir(parents=True)
    else:
        path.touch()
    with fakes(folder, lives=("exit:0",)) as running:
        assert running.status() == 1
    assert f"jaxft: --folder {folder} cannot hold logs and events: " in running.text()
    assert "Traceback" not in running.text()


def test_a_token_reaches_the_groups_of_a_coordinator_that_was_given(folder: Path) -> None:
    show = ("sh", "-c", 'echo "token=$JAXFT_TOKEN coordinator=$JAXFT_COORDINATOR"')
    with launch(folder, program=show, JAXFT_TOKEN="secret", JAXFT_COORDINATOR="head:7") as running:
        assert running.status() == 0, running.text()
    assert "[group-0] token=secret coordinator=head:7" in running.text()
    assert not list(folder.glob("*.warm.log"))  # a shell is not forked from a warm process


@pytest.mark.parametrize("elsewhere", [True, False])
def test_certificates_are_for_a_coordinator_that_was_given(folder: Path, elsewhere: bool) -> None:
    """The launcher's own has no TLS: a group that asks for it would not be admitted."""
    show = ("sh", "-c", 'echo "tls=$JAXFT_TLS_CA,$JAXFT_TLS_CERT,$JAXFT_TLS_KEY."')
    environment = {"JAXFT_TLS_CA": "ca.pem", "JAXFT_TLS_CERT": "group.pem", "JAXFT_TLS_KEY": "group.key"}
    environment |= {"JAXFT_COORDINATOR": "head:7"} if elsewhere else {}
    with launch(folder, program=show, **environment) as running:
        assert running.status() == 0, running.text()
    assert f"[group-0] tls={'ca.pem,group.pem,group.key' if elsewhere else ',,'}." in running.text()

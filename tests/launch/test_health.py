"""`jaxft launch --health` beside real processes that do not train. `test_real.py` drains a group that does."""

import os
import re
from pathlib import Path

import pytest

from tests import patience
from tests.launch.launches import FAKE, Launch, fakes, is_alive, launch

pytestmark = pytest.mark.processes

# Critical while there is a file sick-GROUP in the folder.
SICK = "test ! -e {folder}/sick-{group} || { echo link down; exit 2; }"


def rules(folder: Path, action: str, shell: str = SICK) -> tuple[str, ...]:
    """The flags for one rule; its file is beside the folder."""
    file = folder.with_name("rules.toml")
    file.write_text(
        f'[[rule]]\nname = "fabric"\nsource = "command"\naction = "{action}"\ninterval_s = 0.1\nconsecutive = 2\n'
        f"timeout_s = 1000\ncommand = ['sh', '-c', '{shell}']\n"
    )
    return ("--health", str(file))


def changes(running: Launch) -> list[tuple[str, str, str]]:
    return [(one["group"], one["before"], one["level"]) for one in running.events("health_changed")]


def test_a_sick_group_is_drained_and_the_others_go_on(folder: Path) -> None:
    lives = ("leave:75 steps:3 made:up-{group} gate:go exit:0",)
    with fakes(folder, "--groups", "2", *rules(folder, "drain"), lives=lives) as running:
        running.until_file("up-group-1")
        running.file("sick-group-1").touch()
        ended = running.until("group_ended")
        assert (ended["group"], ended["status"]) == ("group-1", 75)
        running.file("go").touch()
        assert running.status() == 0, running.text()
    assert changes(running) == [("group-1", "ok", "critical")]
    assert running.events("health_changed")[0]["text"] == "link down"
    (acted,) = running.events("health_acted")
    assert (acted["group"], acted["life"], acted["rule"], acted["action"]) == (
        "group-1",
        0,
        "fabric",
        "drain",
    )
    assert running.events("group_restarts") == []
    assert "group-1, rule 'fabric': critical (was ok): link down" in running.text()


def test_a_rule_that_kills_has_the_group_restarted(folder: Path) -> None:
    lives = ("deaf steps:3 made:up mute", "steps:4 gate:go exit:0")
    with fakes(folder, *rules(folder, "kill"), lives=lives) as running:
        running.until_file("up")
        running.file("sick-group-0").touch()
        running.until("health_acted")
        running.file("sick-group-0").unlink()
        running.until("group_started", 2)
        running.until("health_changed", 2)
        running.file("go").touch()
        assert running.status() == 0, running.text()
    # If this test is slow, the second life is killed too; the level has not changed in between.
    assert changes(running)[:2] == [("group-0", "ok", "critical"), ("group-0", "critical", "ok")]
    first = running.events("group_ended")[0]
    assert (first["ending"], first["status"]) == ("killed", -9)


def test_a_drained_group_that_does_not_leave_is_killed(folder: Path) -> None:
    lives = ("group-1=deaf steps:3 made:up-{group} gate:go exit:0",)
    words = ("--groups", "2", "--drain-timeout-s", "0.5", *rules(folder, "drain"))
    with fakes(folder, *words, lives=lives) as running:
        running.until_file("up-group-1")
        running.file("sick-group-1").touch()
        assert running.until("group_ended")["ending"] == "killed"
        running.file("go").touch()
        assert running.status() == 0, running.text()
    assert "group-1 did not leave within 0.5 s: it is killed" in running.text()
    assert running.events("group_restarts") == []


def test_the_last_group_of_a_job_is_kept(folder: Path) -> None:
    """The launcher's own coordinator has no other groups: one of two is drained, although both are sick."""
    lives = ("leave:75 steps:3 made:up-{group} gate:go exit:0",)
    words = ("--no-warm", "--groups", "2", *rules(folder, "drain"))
    with launch(folder, *words, program=(*FAKE, *lives)) as running:
        for group in ("group-0", "group-1"):
            running.until_file(f"up-{group}")
            running.file(f"sick-{group}").touch()
        drained = running.until("group_ended")["group"]
        patience.until(lambda: "is kept until one does" in running.text(), "the last to be kept")
        running.file("go").touch()
        assert running.status() == 0, running.text()
    assert [one["group"] for one in running.events("health_acted")] == [drained]
    assert sorted(one["ending"] for one in running.events("group_ended")) == ["again", "done"]


def test_a_check_that_runs_ends_with_the_launch(folder: Path) -> None:
    hangs = "echo $$ > {folder}/new; mv {folder}/new {folder}/check; exec sleep 1000"
    with fakes(folder, *rules(folder, "warn", hangs), lives=("steps:1 gate:go exit:0",)) as running:
        running.until_file("check")
        pid = int(running.file("check").read_text())
        assert is_alive(pid)
        running.file("go").touch()
        assert running.status() == 0, running.text()
        patience.until(lambda: not is_alive(pid), "the check to end")


def test_a_check_ends_with_a_launcher_that_is_killed(folder: Path) -> None:
    hangs = "echo $$ > {folder}/new; mv {folder}/new {folder}/check; exec sleep 1000"
    with fakes(folder, *rules(folder, "warn", hangs), lives=("mute",)) as running:
        running.until_file("check")
        running.process.kill()
        patience.until(lambda: not is_alive(int(running.file("check").read_text())), "the check to end")


def test_bad_rules_are_refused_before_anything_starts(folder: Path) -> None:
    flags = rules(folder, "restart")
    with launch(folder, *flags, program=("true",)) as running:
        assert running.status() == 1
    said = "rule 1 ('fabric'): `action` must be one of warn, drain, kill, not 'restart'."
    assert re.search(re.escape(f"--health {flags[1]}, {said}"), running.text())
    assert not os.path.exists(folder)

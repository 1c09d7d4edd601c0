"""What must not happen gets a clear error, in the process that asked for it, and the others go on."""

from pathlib import Path

import pytest

import jaxft
from jaxft._transport._handshake import DATA_PLANE_VERSION
from tests.clusters import cluster

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

STEPS = ("--steps", "8")


# The flags in which a group differs from the job, and the error that names them.
DIFFER = {
    ("--shards", "5"): "shards: the job has '4', this group '5'",
    ("--rate", "0.02"): "program: the job has",
    ("--width", "48"): "state: the job has",
    ("--data-plane", "4"): f"jaxft: the job has '{jaxft.__version__}, data plane {DATA_PLANE_VERSION}'",
    ("--shift", "1"): "batch of step 0 and shard 0: the job has",
}


def test_a_group_that_differs_is_refused_with_what_differs(tmp_path: Path) -> None:
    """Five at once come to a job of one group that waits at its third step."""
    gate = tmp_path / "refused"
    with cluster(tmp_path) as here:
        here.start_coordinator()
        first = here.start("group-0", *STEPS, "--gate", f"3:{gate}")
        here.until(lambda: first.step == 3, "the job to run")
        others = {flags: here.start(f"other{flags[0]}", *STEPS, *flags) for flags in DIFFER}
        for other in others.values():
            here.until(lambda other=other: other.process.poll() is not None, "the other group to end")
        gate.touch()
        here.until_finished(first)
        for flags, difference in DIFFER.items():
            assert others[flags].process.returncode == 1
            assert "JoinRefused: the coordinator localhost" in others[flags].log()
            assert difference in others[flags].log()
        assert [event["step"] for event in first.steps()] == list(range(1, 9))


def test_a_second_process_of_a_group_waits_until_the_first_is_gone(tmp_path: Path) -> None:
    """As after the same launch twice: what runs already is not disturbed."""
    with cluster(tmp_path) as here:
        here.start_coordinator()
        gate = tmp_path / "gate"
        groups = here.start_together(("group-0", "group-1"), lambda _group: (*STEPS, "--gate", f"3:{gate}"))
        first, other = groups.values()
        here.until(lambda: first.step == other.step == 3, "the job to run")
        second = here.start("group-0", *STEPS)
        here.until(
            lambda: "does not admit group 'group-0': another process" in second.log(), "it to hear that"
        )
        log = here.coordinator_log.read_text()
        assert "turns a process away: another process takes part as 'group-0'" in log
        assert "lost group-0" not in log
        first.process.kill()
        gate.touch()
        here.until_finished(second, other)
        assert second.digest == other.digest


def test_a_coordinator_that_is_not_there_is_named() -> None:
    manager = jaxft.Manager("localhost:9", group="group-0", failure_timeout_s=0.5)
    with pytest.raises(
        jaxft.CoordinatorUnreachable, match=r"no answer from the coordinator localhost:9 for 0.5 s"
    ):
        manager.__enter__()


def test_a_coordinator_without_an_address_is_refused_at_once() -> None:
    with pytest.raises(jaxft.ConfigurationError, match=r"separated by commas, not 'localhost'"):
        jaxft.Manager("localhost", group="group-0")
    with pytest.raises(jaxft.ConfigurationError, match=r'must be a str, "host:port", not 29510'):
        jaxft.Manager(29510, group="group-0")  # pyright: ignore[reportArgumentType]
    for url in ("http://host:29510", "grpc://a/host:29510"):
        with pytest.raises(
            jaxft.ConfigurationError, match=rf"without a scheme or a path: host:29510, not '{url}'"
        ):
            jaxft.Manager(url, group="group-0")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"group": ""}, "group must be a name"),
        ({"group": "a\nb"}, "group must be a name"),
        ({"group": "g", "job": "j" * 300}, "job must be a name"),
        ({"group": 3}, "group must be a name of 1 to 200 printable characters, not 3"),
        ({"group": ".."}, "group must not be '..', which means a folder"),
        ({"group": "a", "job": "."}, "job must not be '.', which means a folder"),
        ({"group": "a", "job": "run "}, "job must not begin or end with a space, unlike 'run '"),
        ({"group": "a] b"}, "group must not contain '] ', which ends it in the log, unlike 'a] b'"),
        ({"group": "g", "network": "ib0"}, "network must be a jaxft.Network: .* not a str"),
        ({"group": "g", "spare": "no"}, "spare must be True or False, not a str"),
        ({"group": "g", "events": 1}, "events must be the path of a file, .* not a int"),
        ({"group": "g", "step": -1}, "step must be at least 0, not -1"),
        ({"group": "g", "history": -1}, "history must be at least 0, not -1"),
        ({"group": "g", "history": 1 << 64}, "history is 18446744073709551616, which is no history of a job"),
        ({"group": "g", "history": "7"}, "history must be an int of at least 0, not '7', a str"),
        ({"group": "g", "failure_timeout_s": 0}, "failure_timeout_s must be more than 0"),
        ({"group": "g", "min_replicas": 0}, "min_replicas must be at least 1"),
        (
            {"group": "g", "min_replicas": "2"},
            r"min_replicas must be an int of at least 1, not '2', a str. Convert it: int\('2'\)",
        ),
        ({"group": "g", "failure_timeout_s": "60"}, r"failure_timeout_s must be a number .* float\('60'\)"),
        ({"group": "g", "digest_every": True}, "digest_every must be an int of at least 1, not True, a bool"),
        ({"group": "g", "checkpoints": "/data"}, r"checkpoints is '/data'\. It must be a jaxft\.Checkpoints"),
    ],
)
def test_arguments_that_cannot_be_right(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(jaxft.ConfigurationError, match=text):
        jaxft.Manager("localhost:29510", **arguments)  # pyright: ignore[reportArgumentType]

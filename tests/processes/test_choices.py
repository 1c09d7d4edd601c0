"""What users choose: spares, one shard for each member, a least number of groups. On real processes."""

import itertools
import signal
from pathlib import Path

import pytest

from tests.clusters import Cluster, Worker, cluster, digest_alone
from tests.operate import port

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

STEPS = 30
KILLED_AT = 15


@pytest.fixture
def undisturbed() -> str:
    return digest_alone(STEPS)


def report_of(worker: Worker, step: int) -> dict[str, object]:
    return next(event for event in worker.steps() if event["step"] == step)


def until_known(here: Cluster, web: port.Port, group: str, step: int) -> None:
    """Wait until the coordinator knows that a spare has followed to this step. Before, it takes no place there."""
    here.until(lambda: web.group(group).get("step") == step, f"{group} to be known at step {step}")


def test_a_spare_takes_a_dead_members_shards_in_the_very_same_step(undisturbed: str, tmp_path: Path) -> None:
    following = tmp_path / "spare-follows"
    gate = ("--gate", f"{KILLED_AT}:{following}")

    def flags(group: str) -> tuple[str, ...]:
        own = {"group-1": (*gate, "--die", f"exchange step {KILLED_AT}"), "spare": ("--spare",)}
        return ("--steps", str(STEPS), *own.get(group, gate))

    with cluster(tmp_path) as here:
        web = port.start(here)
        workers = here.start_together(("group-0", "group-1", "spare"), flags)
        until_known(here, web, "spare", KILLED_AT)
        following.touch()
        here.until_dead(workers["group-1"])
        survivor, spare = workers["group-0"], workers["spare"]
        here.until_finished(survivor, spare)
        assert {survivor.digest, spare.digest} == {undisturbed}
        before, kill = report_of(survivor, KILLED_AT), report_of(survivor, KILLED_AT + 1)
        assert before["members"] == ["group-0", "group-1"]
        assert kill["members"] == ["group-0", "spare"]
        # The survivor computed its own two shards once; the other two came from the spare.
        assert kill["shards"] == [0, 1]
        assert not any(event["shards"] for event in spare.steps() if event["step"] <= KILLED_AT)
        assert report_of(spare, KILLED_AT + 1)["shards"] == [2, 3]


def test_below_min_replicas_the_job_waits_says_for_whom_and_goes_on(undisturbed: str, tmp_path: Path) -> None:
    flags = ("--steps", str(STEPS), "--min-replicas", "2")
    with cluster(tmp_path) as here:
        here.start_coordinator()
        die = ("--die", f"exchange step {KILLED_AT}")
        workers = here.start_together(
            ("group-0", "group-1"), lambda group: (*flags, *(die if group == "group-1" else ()))
        )
        survivor = workers["group-0"]
        here.until_dead(workers["group-1"])
        text = f"waiting: step {KILLED_AT} needs 2 groups that hold it, and 1 do (group-0); no other group is present"
        here.until(lambda: survivor.logged(text), "the survivor to say for whom it waits")
        assert survivor.logged("lost: group-1 (")
        assert len(survivor.steps()) == KILLED_AT
        back = here.start("group-1", *flags)
        here.until_finished(survivor, back)
        assert {survivor.digest, back.digest} == {undisturbed}


@pytest.mark.long
def test_a_group_goes_to_its_coordinator_through_no_proxy(undisturbed: str, tmp_path: Path) -> None:
    """Without `no_proxy`, gRPC would go through it even on one machine."""
    with cluster(tmp_path) as here:
        here.environment |= {"http_proxy": "http://127.0.0.1:1", "no_proxy": "", "no_grpc_proxy": ""}
        here.start_coordinator()
        group = here.start("group-0", "--steps", str(STEPS), fresh=True)
        here.until_finished(group)
        assert group.digest == undisturbed


@pytest.mark.long
def test_one_shard_for_each_member_the_batch_shrinks_with_the_members(tmp_path: Path) -> None:
    """TorchFT's meaning: the mean over the groups that are present."""
    groups = ("group-0", "group-1", "group-2")
    with cluster(tmp_path) as here:
        here.start_coordinator()
        computed = tmp_path / "others-computed"
        own = {"group-0": ("--gate", f"{KILLED_AT}:{computed}", "--die", f"exchange step {KILLED_AT}")}
        tells_all = ("--die", f"exchange step {STEPS}")  # it never comes so far
        workers = here.start_together(
            groups, lambda group: ("--steps", str(STEPS), "--shards", "0", *own.get(group, tells_all))
        )
        exchanges = f"exchange step {KILLED_AT}"
        for group in groups[1:]:
            here.until(
                lambda group=group: workers[group].logged(exchanges), f"{group} to have computed its shard"
            )
        computed.touch()
        here.until_dead(workers["group-0"])
        survivors = [workers["group-1"], workers["group-2"]]
        here.until_finished(*survivors)
        assert len({worker.digest for worker in survivors}) == 1
        assert report_of(survivors[0], KILLED_AT)["members"] == list(groups)
        assert report_of(survivors[0], KILLED_AT + 1)["members"] == ["group-1", "group-2"]
        for one, other in zip(*(worker.steps() for worker in survivors), strict=True):
            assert one["loss"] == other["loss"]
            # What counts is the batch of the place that a group has in the end; nothing was computed for the dead.
            members = one["members"]
            assert [one["shards"][-1], other["shards"][-1]] == [
                members.index("group-1"),
                members.index("group-2"),
            ]
            moved = one["step"] == KILLED_AT + 1
            assert len(one["shards"]) == len(other["shards"]) == (2 if moved else 1)


def test_two_jobs_with_the_same_group_names_do_not_meet(tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator("--join-timeout-ms", "600000")
        started: list[Worker] = []
        for job, rate in (("one", "0.01"), ("two", "0.02")):
            flags = (
                "--job",
                job,
                "--rate",
                rate,
                "--steps",
                str(STEPS),
                "--gate",
                f"{KILLED_AT}:{tmp_path}/go",
                "--gate",
                f"start:{tmp_path}/present",
            )
            started += [here.start(group, *flags) for group in ("group-0", "group-1")]
        for job, group in itertools.product(("one", "two"), ("group-0", "group-1")):
            text = f"[{job}] {group} is present"
            here.until(lambda text=text: text in here.coordinator_log.read_text(), text)
        (tmp_path / "present").touch()
        here.until(lambda: all(worker.steps() for worker in started), "both jobs to train")
        started[0].process.send_signal(signal.SIGKILL)
        here.until_dead(started[0])
        (tmp_path / "go").touch()
        here.until_finished(*started[1:])
        of_two = {started[2].digest, started[3].digest}
        assert len(of_two) == 1
        assert started[1].digest not in of_two
        log = here.coordinator_log.read_text()
        assert "[one] lost group-0" in log
        assert "[two] lost" not in log


def test_a_group_back_from_a_long_sleep_heals_whatever_it_believed(undisturbed: str, tmp_path: Path) -> None:
    """Stopped in the middle of a step, it wakes up in a quorum that is long over."""
    last = tmp_path / "sleeper-back"
    flags = ("--steps", str(STEPS), "--gate", f"25:{last}", "--gate", f"{KILLED_AT}:{tmp_path}/asleep")
    with cluster(tmp_path) as here:
        here.start_coordinator()
        workers = here.start_together(("group-0", "group-1", "group-2"), lambda _group: flags)
        sleeper = workers["group-1"]
        here.until(lambda: sleeper.step == KILLED_AT, "the step in which it falls asleep")
        sleeper.process.send_signal(signal.SIGSTOP)
        (tmp_path / "asleep").touch()
        others = [workers["group-0"], workers["group-2"]]
        here.until(lambda: all(worker.step == 25 for worker in others), "the others to go on")
        sleeper.process.send_signal(signal.SIGCONT)
        here.until(lambda: sleeper.logged("heals to step 25"), "the sleeper to heal")
        last.touch()
        here.until_finished(sleeper, *others)
        assert {worker.digest for worker in (sleeper, *others)} == {undisturbed}
        assert "lost group-1 (no heartbeat for" in here.coordinator_log.read_text()

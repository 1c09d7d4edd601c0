"""All groups die at once, on real processes: the job resumes from a checkpoint, and never from a fresh state."""

import shutil
import signal
from pathlib import Path

import pytest

from tests.clusters import Cluster, Worker, cluster, digest_alone

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

STEPS = 40
EVERY = 10
DIE_AT = 25
GROUPS = ("group-0", "group-1")
# The job resumes after as long a time without its groups. A group that gets no CPU for this long heals instead.
TIMEOUT = ("--heartbeat-timeout-ms", "4000")


@pytest.fixture
def undisturbed() -> str:
    return digest_alone(STEPS)


def flags(here: Cluster, steps: int = STEPS) -> tuple[str, ...]:
    saved = str(here.folder / "checkpoints")
    return "--steps", str(steps), "--checkpoints", saved, "--checkpoint-every", str(EVERY)


def saved_steps(here: Cluster) -> set[str]:
    folder = here.folder / "checkpoints"
    return {path.name for path in folder.iterdir() if path.name.isdigit()} if folder.exists() else set()


def train_and_kill_all(here: Cluster) -> None:
    """Let both groups come to step DIE_AT, with the checkpoint of step 20 written, and kill them."""
    here.start_coordinator(*TIMEOUT)
    first, gate = here.folder / "first-saved", here.folder / "never"
    gates = ("--gate", f"15:{first}", "--gate", f"{DIE_AT}:{gate}")
    workers = here.start_together(GROUPS, lambda _group: (*flags(here), *gates))
    # A save that is still under way would have step 20's skipped.
    saved = lambda: any(worker.logged("saved step 10") for worker in workers.values())  # noqa: E731
    here.until(saved, "the checkpoint of step 10")
    first.touch()
    at_gate = lambda: all(worker.step == DIE_AT for worker in workers.values())  # noqa: E731
    here.until(at_gate, f"both groups to come to step {DIE_AT}")
    here.until(lambda: "20" in saved_steps(here), "the checkpoint of step 20")
    kill_all(here, workers)


def kill_all(here: Cluster, workers: dict[str, Worker]) -> None:
    for worker in workers.values():
        worker.process.send_signal(signal.SIGKILL)
    for worker in workers.values():
        here.until_dead(worker)
    here.until_lost(*GROUPS)


def resume(here: Cluster) -> list[Worker]:
    gate = here.folder / "all-back"
    workers = [here.start(group, *flags(here), "--gate", f"30:{gate}") for group in GROUPS]
    here.until(
        lambda: all(worker.steps() or worker.logged("heals to") for worker in workers), "both to be back"
    )
    gate.touch()
    here.until_finished(*workers)
    return workers


def test_it_resumes_from_the_newest_checkpoint_and_says_so(undisturbed: str, tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        train_and_kill_all(here)
        workers = resume(here)
        assert {worker.digest for worker in workers} == {undisturbed}
        assert {worker.events()[0]["step"] for worker in workers} <= {20, 0}  # 0: it came late, and healed
        text = f"restored step 20 from {tmp_path}/checkpoints/20; the job had committed {DIE_AT}: 5 steps are done"
        assert any(worker.logged(text) for worker in workers)
        assert "resumes at step 20" in here.coordinator_log.read_text()
        assert "5 steps are done again" in here.coordinator_log.read_text()
        assert "40" in saved_steps(here)  # also the last state


@pytest.mark.long
def test_a_damaged_checkpoint_is_passed_over(undisturbed: str, tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        train_and_kill_all(here)
        for path in (tmp_path / "checkpoints" / "20").rglob("*"):
            if path.is_file() and path.stat().st_size > 1000:
                path.write_bytes(path.read_bytes()[:-100])
        workers = resume(here)
        assert {worker.digest for worker in workers} == {undisturbed}
        assert any(worker.logged("checkpoints/20: ") for worker in workers)
        assert "resumes at step 10" in here.coordinator_log.read_text()


def test_without_a_checkpoint_yet_it_begins_again(undisturbed: str, tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator(*TIMEOUT)
        gate = here.folder / "never"
        first = here.start_together(GROUPS, lambda _group: (*flags(here), "--gate", f"7:{gate}"))
        here.until(lambda: all(worker.step == 7 for worker in first.values()), "both to come to step 7")
        kill_all(here, first)
        assert not saved_steps(here)
        workers = resume(here)
        assert {worker.digest for worker in workers} == {undisturbed}
        text = "resumes at step 0 with the state of group-0, group-1: no group is left that held step 7; 7 steps are "
        assert text + "done again" in here.coordinator_log.read_text()
        assert saved_steps(here)
        assert not (here.folder / "checkpoints" / "beginning.json").exists()


def test_a_fresh_group_alone_never_becomes_the_truth(undisturbed: str, tmp_path: Path) -> None:
    """The state wipe: everyone who held step 25 is dead, and one comes back with nothing."""
    with cluster(tmp_path) as here:
        train_and_kill_all(here)
        shutil.move(tmp_path / "checkpoints", tmp_path / "elsewhere")
        fresh = here.start("group-0", *flags(here), "--failure-timeout-s", "8")
        here.until(lambda: fresh.process.poll() is not None, "the fresh group to give up")
        assert fresh.process.returncode == 1
        assert fresh.logged("CannotHeal")
        assert fresh.logged("A fresh state never replaces a committed one")
        assert not fresh.steps()
        # With the checkpoints back, as when their disk is mounted again, it continues.
        shutil.rmtree(tmp_path / "checkpoints")
        shutil.move(tmp_path / "elsewhere", tmp_path / "checkpoints")
        workers = resume(here)
        assert {worker.digest for worker in workers} == {undisturbed}


def test_a_checkpoint_of_another_run_of_the_same_name_is_refused(tmp_path: Path) -> None:
    """Equal step numbers of different histories: the second run must not be mixed with the first one's states."""
    with cluster(tmp_path) as here:
        train_and_kill_all(here)
        assert here.coordinator is not None
        here.coordinator.kill()
        here.coordinator.wait()
        here.start_coordinator()
        gate = here.folder / "never"
        again = here.start("group-0", "--steps", str(STEPS), "--gate", f"30:{gate}")
        here.until(lambda: again.step == 30, "the run that was started again")
        again.process.send_signal(signal.SIGKILL)
        here.until_dead(again)
        here.until_lost("group-0")
        old = here.start("group-1", *flags(here))
        here.until(lambda: old.process.poll() is not None, "the old state to be refused")
        assert old.process.returncode == 1
        assert old.logged("JoinRefused")
        assert old.logged("brings step 20 of another history of job 'toy'")


@pytest.mark.long
def test_a_group_that_counted_on_a_holder_reads_after_all(undisturbed: str, tmp_path: Path) -> None:
    """The only holder stands still like a host without power: its death is known after the heartbeat timeout."""
    first, never = tmp_path / "first-saved", tmp_path / "never"
    with cluster(tmp_path) as here:
        here.start_coordinator(*TIMEOUT)
        gates = ("--gate", f"15:{first}", "--gate", f"{DIE_AT}:{never}")
        holder = here.start("group-0", *flags(here), *gates)
        here.until(lambda: "10" in saved_steps(here), "the checkpoint of step 10")
        first.touch()
        here.until(lambda: holder.step == DIE_AT and "20" in saved_steps(here), "the checkpoint of step 20")
        holder.process.send_signal(signal.SIGSTOP)
        heir = here.start("group-1", *flags(here), "--failure-timeout-s", "8")
        here.until(
            lambda: heir.logged("reads no checkpoint: it heals from"), "the heir to count on the holder"
        )
        here.until_finished(heir)
        assert "reads the checkpoint, which it had left to other groups: no group that holds" in heir.log()
        assert heir.logged("restored step 20 from")
        assert heir.digest == undisturbed

"""Groups of several processes, each process on a separate host, in a network that can be broken.

A cut link carries nothing, without a sign at either end, so only silence shows it. Every deadline of a job follows
from its `failure_timeout_s`: a rank may be silent for a sixth of it, an exchange or a heal for a half.
"""

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from jaxft_launch.processes._ranks import free_ports
from tests import patience
from tests.clusters import Cluster, Worker, cluster
from tests.faults.namespaces import MISSING, Switch, available, switch
from tests.processes.ranks import Group, digest_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

RANKS = 2
HOSTS = ("coordinator", "group-0.0", "group-0.1", "group-1.0", "group-1.1", "replacement")
STEPS = 20
# The step in which something happens, and the steps before which all wait until it is over, or until all are back.
STRUCK = 4
GATE = 7
LAST_GATE = 13
# On a quiet machine. Longer where a process that only waits for a core would look silent.
FAILURE_S, MOST_FAILURE_S = 18.0, 90.0
# JAX ends processes that do not reach each other for some 70 s.
BEFORE_JAX_S = 45.0
NEVER_S = 600.0
AGAIN = 75

Own = Mapping[int, Sequence[str]]


@dataclass
class Job:
    """A coordinator and groups, each of whose ranks is on a separate host."""

    here: Cluster
    net: Switch
    failure_s: float
    steps: int = STEPS

    def start(
        self, name: str, *flags: str, own: Own | None = None, only: Sequence[int] = (), port: int = 0
    ) -> Group:
        """Start a group, or only some of its ranks. `own` are further flags of single ranks."""
        port = port or free_ports(1)[0]
        return Group(name, [self._rank(name, rank, port, flags, own or {}) for rank in only or range(RANKS)])

    def _rank(
        self, name: str, rank: int, port: int, flags: Sequence[str], own: Own, host: str = ""
    ) -> Worker:
        host = host or f"{name}.{rank}"
        return self.here.start(
            name,
            *("--world", f"{rank}:{RANKS}:{port}", "--meet", self.net.address(f"{name}.0")),
            *("--host", self.net.address(host), "--failure-timeout-s", f"{self.failure_s:g}"),
            *("--steps", str(self.steps), *flags, *own.get(rank, ())),
            host=host,
        )

    def replace(self, name: str, rank: int, port: int, *flags: str) -> Worker:
        """Start a rank on another host than before."""
        return self._rank(name, rank, port, flags, {}, host="replacement")

    def start_both(self, *flags: str, own: Own | None = None) -> tuple[Group, Group]:
        """Start two groups, which begin together; `own` are further flags of the second one's ranks."""
        first = self.start("group-0", *self.here.together, *flags)
        second = self.start("group-1", *self.here.together, *flags, own=own)
        self.here.begin_once_present("group-0", "group-1")
        return first, second

    def gate(self, name: str) -> Path:
        return self.here.folder / name

    def gates(self, **steps: int) -> tuple[str, ...]:
        """Flags that have ranks wait before steps, until `gate(name).touch()`."""
        return tuple(word for name, step in steps.items() for word in ("--gate", f"{step}:{self.gate(name)}"))

    def hold(self, rank: int, text: str) -> dict[int, Sequence[str]]:
        """Flags of a rank that waits at a line of the library's log, until `go_on`."""
        return {rank: ("--hold", f"{text}:{self.gate('hold')}")}

    def until_held(self) -> None:
        self.here.until(self.gate("hold.held").exists, "the rank to come to where it is held")

    def go_on(self) -> None:
        self.gate("hold").touch()

    def until_coordinator_says(self, text: str) -> None:
        self.here.until(lambda: self.logged(text), f"the coordinator to say {text!r}")

    def logged(self, text: str) -> bool:
        return text in self.here.coordinator_log.read_text()

    def until_steps(self, group: Group, count: int) -> None:
        for worker in group.ranks:
            self.here.until(
                lambda worker=worker: len(worker.steps()) >= count, f"{group.name} to take {count} steps"
            )

    def until_ended_again(self, group: Group, why: str, *, or_aborted: Sequence[int] = ()) -> None:
        """Wait until all ranks have ended with the status of a group that has lost a rank, and a rank has logged why.

        Ranks in `or_aborted` may have been aborted by JAX, whose service in rank 0 they have lost.
        """
        for rank, worker in enumerate(group.ranks):
            self.here.until(lambda worker=worker: worker.process.poll() is not None, "both ranks to end")
            if rank in or_aborted and worker.process.returncode == -signal.SIGABRT:
                assert worker.logged("JAX distributed service"), worker.log()
                continue
            assert worker.process.returncode == AGAIN, worker.log()
            assert worker.logged("because a group shares fate"), worker.log()
        assert any(worker.logged(why) for worker in group.ranks), self.here.logs()

    def until_heals(self, group: Group) -> None:
        self.here.until(lambda: group.leader.logged("heals to step"), f"{group.name} to heal")

    def finish(self, undisturbed: str, *groups: Group) -> None:
        """Run to the end, with the bits of the undisturbed run."""
        workers = [worker for group in groups for worker in group.ranks]
        self.here.until_finished(*workers)
        assert {worker.digest for worker in workers} == {undisturbed}, self.here.logs()
        for worker in workers:
            steps = [event["step"] for event in worker.steps()]
            assert steps == sorted(set(steps))


def lost_no_step(group: Group) -> None:
    for worker in group.ranks:
        assert [event["step"] for event in worker.steps()] == list(range(1, STEPS + 1))


@pytest.fixture(scope="module")
def net() -> Iterator[Switch]:
    if not available():
        pytest.skip(MISSING)
    with switch(HOSTS) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return digest_of(tmp_path_factory.mktemp("alone"), RANKS, "--steps", str(STEPS))


@contextmanager
def job_on(
    net: Switch, folder: Path, failure_s: float = 0.0, most_failure_s: float = MOST_FAILURE_S
) -> Iterator[Job]:
    net.restore()
    with cluster(folder) as here:
        here.namespace, here.host = net.namespace, net.address("coordinator")
        here.start_coordinator("--insecure")
        yield Job(here, net, failure_s or min(patience.stretched(FAILURE_S), most_failure_s))


def from_the_other_rank(net: Switch) -> None:
    net.cut_off("group-1.0", "group-1.1")


def in_one_direction(net: Switch) -> None:
    net.cut("group-1.1", "group-1.0")


def the_leader_from_all(net: Switch) -> None:
    net.cut_off("group-1.0")


def the_other_from_all(net: Switch) -> None:
    net.cut_off("group-1.1")


@pytest.mark.long
@pytest.mark.parametrize(
    ("cut", "phase", "rank"),
    [
        pytest.param(from_the_other_rank, "compute", 1, marks=pytest.mark.storm),
        pytest.param(the_other_from_all, "compute", 0, marks=pytest.mark.storm),
        (the_leader_from_all, "exchange", 1),
        pytest.param(in_one_direction, "exchange", 0, marks=pytest.mark.storm),
        pytest.param(from_the_other_rank, "vote", 0, marks=pytest.mark.storm),
        pytest.param(the_leader_from_all, "vote", 1, marks=pytest.mark.storm),
        pytest.param(the_other_from_all, "apply", 0, marks=pytest.mark.storm),
        pytest.param(from_the_other_rank, "apply", 1, marks=pytest.mark.storm),
    ],
)
def test_a_rank_that_is_cut_off_from_its_group_ends_it(
    cut: Callable[[Switch], None], phase: str, rank: int, net: Switch, undisturbed: str, tmp_path: Path
) -> None:
    """One rank is held in a phase until the network is cut, so that the cut falls there for it."""
    with job_on(net, tmp_path) as job:
        gates = job.gates(healing=GATE, back=LAST_GATE)
        survivor, victim = job.start_both(*gates, own=job.hold(rank, f"{phase} step {STRUCK}"))
        job.until_held()
        cut(net)
        job.go_on()
        # Rank 0 hears nothing and ends; it cannot tell rank 1, as nothing that it sends is acknowledged.
        job.until_ended_again(victim, "silent for", or_aborted=[1] if cut is in_one_direction else [])
        net.restore()
        back = job.start("group-1", *gates)
        job.until_heals(back)
        job.gate("healing").touch()
        job.gate("back").touch()
        job.finish(undisturbed, survivor, back)
        lost_no_step(survivor)


@pytest.mark.long
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.storm), 1])
def test_a_rank_that_is_cut_off_from_its_peers_costs_its_group_the_place_and_no_process(
    rank: int, net: Switch, undisturbed: str, tmp_path: Path
) -> None:
    """The other rank and the leader have all they need: only the ranks at the two ends of the link can tell."""
    with job_on(net, tmp_path) as job:
        groups = job.start_both(*job.gates(cut=STRUCK, back=LAST_GATE))
        for group in groups:
            job.until_steps(group, STRUCK)
        net.cut_off(f"group-1.{rank}", f"group-0.{rank}")
        job.gate("cut").touch()
        job.until_coordinator_says("evicts group-")
        put_out = groups[1] if job.logged("evicts group-1") else groups[0]
        net.restore()
        # Where the others had committed nothing since, it follows without a heal.
        follows = f"{put_out.name} stands by at step"
        job.here.until(
            lambda: put_out.leader.logged("heals to step") or job.logged(follows),
            f"{put_out.name} to heal or follow",
        )
        job.gate("back").touch()
        job.finish(undisturbed, *groups)


@pytest.mark.long
def test_only_the_leader_needs_the_coordinator_and_waits_for_it(
    net: Switch, undisturbed: str, tmp_path: Path
) -> None:
    """Cut off from it, another rank does not notice, and the leader costs its group its place and no process."""
    with job_on(net, tmp_path, failure_s=NEVER_S) as job:
        groups = job.start_both(*job.gates(first=STRUCK, second=GATE, back=LAST_GATE))
        for group in groups:
            job.until_steps(group, STRUCK)
        net.cut_off("group-1.1", "coordinator")
        job.gate("first").touch()
        for group in groups:
            job.until_steps(group, GATE)
        assert not job.logged("lost group-1")
        assert {tuple(event["members"]) for event in groups[0].leader.steps()} == {("group-0", "group-1")}
        net.cut_off("group-1.0", "coordinator")
        job.gate("second").touch()
        job.until_coordinator_says("lost group-1 (")
        job.until_steps(groups[0], LAST_GATE)
        net.restore()
        job.until_heals(groups[1])
        job.gate("back").touch()
        job.finish(undisturbed, *groups)
        lost_no_step(groups[0])


@pytest.mark.long
def test_a_host_that_stays_away_is_waited_for_and_its_replacement_taken(
    net: Switch, undisturbed: str, tmp_path: Path
) -> None:
    with job_on(net, tmp_path) as job:
        gates = job.gates(back=LAST_GATE)
        survivor, victim = job.start_both(*gates, own=job.hold(1, f"exchange step {STRUCK}"))
        job.until_held()
        net.cut_off("group-1.1")
        job.go_on()
        job.until_ended_again(victim, "silent for")
        port = free_ports(1)[0]
        (half,) = job.start("group-1", *gates, only=[0], port=port).ranks
        job.until_steps(survivor, LAST_GATE)
        assert half.process.poll() is None, half.log()
        assert job.here.coordinator_log.read_text().count("group-1 is present") == 1
        back = Group("group-1", [half, job.replace("group-1", 1, port, *gates)])
        job.until_heals(back)
        job.gate("back").touch()
        job.finish(undisturbed, survivor, back)
        lost_no_step(survivor)


@pytest.mark.long
def test_a_rank_that_is_cut_off_before_all_ranks_are_there_ends_its_group(
    net: Switch, undisturbed: str, tmp_path: Path
) -> None:
    """They have met by JAX, and the last rank has not connected with rank 0."""
    with job_on(net, tmp_path, most_failure_s=BEFORE_JAX_S) as job:
        group = job.start("group-1", own=job.hold(1, "rank 1 listens on port"))
        job.until_held()
        net.cut_off("group-1.0", "group-1.1")
        job.go_on()
        job.until_ended_again(group, f"it has not connected with this rank for {job.failure_s:g} s")
        assert group.leader.logged("Still waiting for group 'group-1' to connect for rank 1")
        assert not job.logged("group-1 is present")
        net.restore()
        job.finish(undisturbed, job.start("group-1"))


@pytest.mark.storm
def test_a_rank_that_is_cut_off_from_its_group_in_a_heal_ends_it(
    net: Switch, undisturbed: str, tmp_path: Path
) -> None:
    with job_on(net, tmp_path) as job:
        gates = job.gates(healing=GATE, back=LAST_GATE)
        survivor = job.start("group-0", *gates)
        job.until_steps(survivor, STRUCK)
        victim = job.start("group-1", *gates, own=job.hold(1, "heals to step"))
        job.until_held()
        net.cut_off("group-1.0", "group-1.1")
        job.go_on()
        job.until_ended_again(victim, "silent for")
        net.restore()
        back = job.start("group-1", *gates)
        job.until_heals(back)
        job.gate("healing").touch()
        job.gate("back").touch()
        job.finish(undisturbed, survivor, back)
        lost_no_step(survivor)


@pytest.mark.long
def test_a_rank_that_is_cut_off_from_its_donors_heals_when_it_reaches_them(
    net: Switch, undisturbed: str, tmp_path: Path
) -> None:
    """The heal fails in one rank, so it begins again in all, and no process ends."""
    with job_on(net, tmp_path) as job:
        gates = job.gates(healing=GATE)
        survivor = job.start("group-0", *gates)
        job.until_steps(survivor, STRUCK)
        joiner = job.start("group-1", *gates, own=job.hold(1, "heals to step"))
        job.until_held()
        net.cut_off("group-0.1", "group-1.1")
        job.go_on()
        job.here.until(lambda: joiner.ranks[1].logged("Dropped donor group-0"), "the fetch to fail")
        net.restore()
        job.here.until(lambda: joiner.leader.log().count("heals to step") > 1, "the group to heal once more")
        job.gate("healing").touch()
        job.finish(undisturbed, survivor, joiner)
        lost_no_step(survivor)


@pytest.mark.storm
def test_a_rank_whose_heal_takes_long_is_waited_for_while_bytes_move(net: Switch, tmp_path: Path) -> None:
    """Rank 0 has its stripes at once, and waits for the other longer than `failure_timeout_s`."""
    steps, width = 6, ("--width", "120000")
    undisturbed = digest_of(tmp_path, RANKS, "--steps", str(steps), *width)
    # Three matrices of 16 rows with 4 bytes, and three of 4 columns with 2 or 4, of which each rank holds a half.
    least_bytes = 120_000 * (3 * 16 * 4 + 3 * 4 * 2) / RANKS
    # A joiner gives up a donor whose chunk takes longer than half of the timeout: of thirteen in one and a half
    # timeouts none does, even if the link moves at a quarter of its rate.
    with job_on(net, tmp_path, most_failure_s=45.0) as job:
        job.steps = steps
        gates = (*job.gates(healing=3), *width)
        survivor = job.start("group-0", *gates)
        job.until_steps(survivor, 3)
        net.cap("group-1.1", round(8 * least_bytes / (1.5 * job.failure_s)))
        try:
            joiner = job.start("group-1", *gates, own=job.hold(1, "wait step 3"))
            job.here.until(lambda: joiner.leader.logged("for rank 1 in 'heal"), "rank 0 to wait")
            job.until_held()  # it has healed
        finally:
            net.uncap("group-1.1")
        job.go_on()
        job.gate("healing").touch()
        job.finish(undisturbed, survivor, joiner)


@pytest.mark.storm
def test_a_rank_whose_exchange_takes_long_is_waited_for_while_bytes_move(net: Switch, tmp_path: Path) -> None:
    """Rank 0 of both groups has its lanes at once, and waits for the other longer than `failure_timeout_s`."""
    steps, width = 6, ("--width", "60000")
    undisturbed = digest_of(tmp_path, RANKS, "--steps", str(steps), *width)
    # The gradients of a matrix of 16 rows and of a matrix of 4 columns, of which each rank sends a half.
    least_bytes = 60_000 * (16 + 4) * 4 / RANKS
    with job_on(net, tmp_path, most_failure_s=45.0) as job:
        job.steps = steps
        both = job.start_both(*width, own=job.hold(1, "exchange step 3"))
        job.until_held()
        net.cap("group-1.1", round(8 * least_bytes / (2 * job.failure_s)))
        job.go_on()
        try:
            job.here.until(lambda: both[1].leader.logged("for rank 1 in 'exchange"), "rank 0 to wait")
            patience.until(
                lambda: all(len(worker.steps()) >= 4 for worker in both[1].ranks),
                "group-1 to take 4 steps",
                limit_s=4 * job.failure_s,
                context=job.here.logs,
            )
        finally:
            net.uncap("group-1.1")
        job.finish(undisturbed, *both)
        assert not job.logged("evicts"), job.here.logs()
        assert not job.logged("tried again"), job.here.logs()


@pytest.mark.storm
def test_a_rank_that_is_cut_off_in_a_save_leaves_the_checkpoint_before(
    net: Switch, undisturbed: str, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    flags = ("--checkpoints", str(saved), "--checkpoint-every", str(GATE))

    def steps() -> set[str]:
        return {path.name for path in saved.glob("[0-9]*")}

    with job_on(net, tmp_path) as job:
        # The second save begins once the first has ended.
        gates = job.gates(first=GATE + 1)
        group = job.start("group-1", *flags, *gates, own=job.hold(1, f"write step {2 * GATE}"))
        job.here.until(lambda: steps() == {str(GATE)}, "the first checkpoint")
        job.gate("first").touch()
        job.until_held()
        net.cut_off("group-1.0", "group-1.1")
        job.go_on()
        job.until_ended_again(group, "silent for")
        assert steps() == {str(GATE)}
        net.restore()
        back = job.start("group-1", *flags)
        job.finish(undisturbed, back)
        assert all(worker.logged(f"restored step {GATE}") for worker in back.ranks)


@pytest.mark.storm
def test_a_rank_that_is_cut_off_at_the_end_ends_its_group_and_the_job_is_done(
    net: Switch, undisturbed: str, tmp_path: Path
) -> None:
    """All steps are done in both ranks, but rank 0 has not taken the group's leave yet."""
    with job_on(net, tmp_path) as job:
        leaving = ("--pause", f"{STEPS}:{tmp_path / 'never'}")
        survivor, victim = job.start_both(own={0: leaving})
        for worker in victim.ranks:
            job.here.until(
                lambda worker=worker: len(worker.steps()) == STEPS, "group-1 to have done all steps"
            )
        net.cut_off("group-1.0", "group-1.1")
        job.until_ended_again(victim, "silent for")
        job.finish(undisturbed, survivor)
        net.restore()
        # It learns that the job is done, or does the rest of it.
        job.here.until_finished(*job.start("group-1").ranks)

"""Groups of several processes: one rank dies at each phase of a step, and the run ends in the same bits."""

import re
import signal
from pathlib import Path

import pytest

from jaxft_launch.processes._ranks import free_ports
from tests import injection
from tests.clusters import Cluster, cluster
from tests.processes.ranks import AGAIN, Group, assert_ends_with_its_group, digest_of, start_ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

STEPS = 18
KILLED_AT = 5
GATE = 7
LAST_GATE = 12
RANKS = 2
# Of four shards in two groups, group-1 computes the third and the fourth.
UNREADABLE = ("--unreadable", "5:2")
TEXT = "OSError: cannot read sample 17"


def start(
    here: Cluster,
    name: str,
    *flags: str,
    die: tuple[int, str] | None = None,
    unreadable: int | None = None,
    last: tuple[str, ...] = (),
    **options: bool,
) -> Group:
    """Start a group; one rank may be told to die, or to raise in a step; `last`: flags of the last rank."""
    meeting = free_ports(1)[0]
    ranks = [
        here.start(
            name,
            *("--world", f"{rank}:{RANKS}:{meeting}", "--steps", str(STEPS), *flags),
            *(("--die", die[1]) if die is not None and die[0] == rank else ()),
            *(UNREADABLE if rank == unreadable else ()),
            *(last if rank == RANKS - 1 else ()),
            **options,
        )
        for rank in range(RANKS)
    ]
    return Group(name, ranks)


def start_together(
    here: Cluster,
    die: tuple[str, int, str],
    *flags: str,
    unreadable: dict[str, int] | None = None,
    last: dict[str, tuple[str, ...]] | None = None,
) -> dict[str, Group]:
    groups = {
        name: start(
            here,
            name,
            *(*here.together, *flags),
            die=(die[1], die[2]) if die[0] == name else None,
            unreadable=(unreadable or {}).get(name),
            last=(last or {}).get(name, ()),
        )
        for name in ("group-0", "group-1")
    }
    here.begin_once_present(*groups)
    return groups


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return digest_of(tmp_path_factory.mktemp("alone"), RANKS, "--steps", str(STEPS))


@pytest.mark.parametrize(
    ("phase", "rank"),
    [
        pytest.param("compute", 0, marks=pytest.mark.long),
        pytest.param("compute", 1, marks=pytest.mark.storm),
        pytest.param("exchange", 0, marks=pytest.mark.storm),
        pytest.param("exchange", 1, marks=pytest.mark.long),
        pytest.param("vote", 0, marks=pytest.mark.long),
        pytest.param("vote", 1, marks=pytest.mark.storm),
        pytest.param("apply", 0, marks=pytest.mark.storm),
        pytest.param("apply", 1, marks=pytest.mark.long),
    ],
)
def test_a_rank_that_is_killed_changes_nothing(
    phase: str, rank: int, undisturbed: str, tmp_path: Path
) -> None:
    started, back_in = tmp_path / "started", tmp_path / "back"
    gates = ("--gate", f"{GATE}:{started}", "--gate", f"{LAST_GATE}:{back_in}")
    with cluster(tmp_path) as here:
        here.start_coordinator()
        groups = start_together(here, ("group-1", rank, f"{phase} step {KILLED_AT}"), *gates)
        victim, survivor = groups["group-1"], groups["group-0"]
        here.until_dead(victim.ranks[rank])
        other = victim.ranks[1 - rank]
        here.until(lambda: other.process.poll() is not None, "the other rank to end too")
        assert_ends_with_its_group(other, 1 - rank)
        back = start(here, "group-1", *gates)
        here.until(lambda: back.leader.logged("heals to step"), "the group to heal")
        started.touch()
        here.until(
            lambda: (
                any(event["shards"] for event in back.leader.steps()) or survivor.leader.step >= LAST_GATE
            ),
            "the group to contribute",
        )
        back_in.touch()
        here.until_finished(*survivor.ranks, *back.ranks)
        assert {worker.digest for worker in (*survivor.ranks, *back.ranks)} == {undisturbed}
        for worker in survivor.ranks:
            assert [event["step"] for event in worker.steps()] == list(range(1, STEPS + 1))


@pytest.mark.skipif(bool(injection.why_not()), reason=injection.why_not() or "it can")
@pytest.mark.parametrize("place", [pytest.param("step", marks=pytest.mark.long), "outside"])
def test_a_collective_that_loses_its_connection_while_both_ranks_live_ends_the_group(
    place: str, tmp_path: Path
) -> None:
    """No program is to blame: with an error of the program, the group would be given up after two lives."""
    goes_on = tmp_path / "goes-on"
    flags = ("--gate", f"{KILLED_AT}:{goes_on}", "--failure-timeout-s", "12")
    sums = ("--sum-after", str(KILLED_AT)) if place == "outside" else ()
    with cluster(tmp_path) as here:
        here.start_coordinator()
        group = start(here, "group-0", *flags, *sums)
        here.until(lambda: group.leader.step == KILLED_AT, "the gate")
        # Gloo writes with writev, and jaxft and gRPC with sendmsg.
        with injection.attached(group.ranks[1].process.pid, "writev:error=ENOBUFS:when=1+"):
            goes_on.touch()
            for rank, worker in enumerate(group.ranks):
                here.until(lambda worker=worker: worker.process.poll() is not None, f"rank {rank} to end")
        for rank, worker in enumerate(group.ranks):
            assert_ends_with_its_group(worker, rank)
        assert any(worker.logged("a computation of all ranks: ") for worker in group.ranks)
        assert "its code raised" not in here.coordinator_log.read_text()


def outside(rank: int) -> str:
    """The line of a rank that is outside of the step while the other waits for it there, in the program's main."""
    return (
        rf"\[jaxft group-0\] rank {rank} has been outside of the step for \d+ s, and rank {1 - rank} has waited for "
        r"it in the step for \d+ s. Its program stands at .*worker.py:\d+ in main"
    )


@pytest.mark.long
def test_rank_0_that_sums_over_all_ranks_while_another_is_in_the_step_says_where_it_stands(
    tmp_path: Path,
) -> None:
    """Nothing can tell that from a long evaluation by one rank, which has no limit: so all that helps is logged."""
    with cluster(tmp_path) as here:
        here.start_coordinator()
        sums = {0: ("--sum-after", str(KILLED_AT))}
        group = start_ranks(here, "group-0", RANKS, ("--steps", str(STEPS)), own=sums)
        here.until(lambda: re.search(outside(0), group.leader.log()), "rank 0 to say where it stands")


@pytest.mark.long
def test_a_rank_that_is_away_between_two_calls_of_the_step_is_named_by_rank_0(tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator()
        back = tmp_path / "back"
        pauses = {1: ("--pause", f"{KILLED_AT}:{back}")}
        group = start_ranks(here, "group-0", RANKS, ("--steps", str(STEPS)), own=pauses)
        for worker in group.ranks:
            here.until(lambda worker=worker: re.search(outside(1), worker.log()), "rank 1 to be named")
        back.touch()
        here.until_finished(*group.ranks)


@pytest.mark.long
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.storm), 1])
def test_a_rank_that_is_stopped_ends_its_group(rank: int, undisturbed: str, tmp_path: Path) -> None:
    """Its host answers for it: only silence shows it."""
    started, back_in = tmp_path / "started", tmp_path / "back"
    gates = ("--gate", f"{GATE}:{started}", "--gate", f"{LAST_GATE}:{back_in}")
    with cluster(tmp_path) as here:
        here.start_coordinator()
        groups = start_together(here, ("", 0, ""), *gates, "--failure-timeout-s", "30")
        victim, survivor = groups["group-1"], groups["group-0"]
        here.until(lambda: victim.leader.step >= KILLED_AT, "a few steps")
        victim.ranks[rank].process.send_signal(signal.SIGSTOP)
        other = victim.ranks[1 - rank]
        here.until(lambda: other.process.poll() is not None, "the other rank to end")
        assert other.process.returncode == AGAIN, other.log()
        assert f"a group shares fate: rank {rank} is lost" in other.log()
        victim.ranks[rank].process.kill()
        back = start(here, "group-1", *gates)
        here.until(lambda: back.leader.logged("heals to step"), "the group to heal")
        started.touch()
        back_in.touch()
        here.until_finished(*survivor.ranks, *back.ranks)
        assert {worker.digest for worker in (*survivor.ranks, *back.ranks)} == {undisturbed}


@pytest.mark.parametrize(
    ("rank", "phase"),
    [
        pytest.param(0, "heals", marks=pytest.mark.long),
        (1, "heals"),
        pytest.param(1, "rehearse", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_is_killed_while_its_group_heals(
    rank: int, phase: str, undisturbed: str, tmp_path: Path
) -> None:
    back_in = tmp_path / "back"
    with cluster(tmp_path) as here:
        here.start_coordinator()
        first = start(here, "group-0", "--gate", f"{GATE}:{back_in}")
        here.until(lambda: first.leader.step >= KILLED_AT, "a few steps")
        victim = start(here, "group-1", die=(rank, f"{phase} "))
        here.until_dead(victim.ranks[rank])
        here.until(lambda: victim.ranks[1 - rank].process.poll() is not None, "the other rank to end too")
        back = start(here, "group-1")
        here.until(lambda: back.leader.logged("heals to step"), "the group to heal")
        back_in.touch()
        here.until_finished(*first.ranks, *back.ranks)
        assert {worker.digest for worker in (*first.ranks, *back.ranks)} == {undisturbed}


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_in_one_rank_is_reported_to_the_job_with_its_text(
    rank: int, undisturbed: str, tmp_path: Path
) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator()
        groups = start_together(here, ("", 0, ""), unreadable={"group-1": rank})
        ill, survivor = groups["group-1"], groups["group-0"]
        here.until_finished(*survivor.ranks)
        here.until(lambda: all(worker.process.poll() is not None for worker in ill.ranks), "group-1 to end")
        assert {worker.digest for worker in survivor.ranks} == {undisturbed}
        where = " (in rank 1)" if rank else ""
        assert survivor.leader.logged(f"lost group-1 (its code raised {TEXT}{where} (step 5, shard 2))")
        assert ill.ranks[rank].process.returncode == 1, ill.ranks[rank].log()
        assert ill.ranks[rank].logged(
            "The other groups could do this step, and go on without this group. The other"
        )
        assert ill.ranks[1 - rank].process.returncode == AGAIN, ill.ranks[1 - rank].log()


@pytest.mark.long
def test_a_shard_that_a_rank_of_every_group_cannot_read_halts_the_job_once(tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator()
        groups = start_together(here, ("", 0, ""), unreadable={"group-0": 0, "group-1": 1})
        for number, group in enumerate(groups.values()):
            for worker in group.ranks:
                here.until(lambda worker=worker: worker.process.poll() is not None, "both groups to end")
            assert group.ranks[number].logged("JobHalted: "), group.ranks[number].log()
            assert group.ranks[number].logged("shard 2 of step 5 of job 'toy' fails in every group: ")
        assert here.coordinator_log.read_text().count("halts: shard 2 of step 5") == 1


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (("--rate", "0.5"), "program"),
        pytest.param(
            ("--precision", "highest"), "jax_default_matmul_precision", id="flags", marks=pytest.mark.storm
        ),
    ],
)
def test_a_rank_with_another_program_than_its_rank_0_ends_with_what_differs(
    flags: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator()
        group = start(here, "group-0", last=flags)
        first, second = group.ranks
        for worker in group.ranks:
            here.until(lambda worker=worker: worker.process.poll() is not None, "both ranks to end")
        assert second.process.returncode == 1, second.log()
        assert second.logged(
            "Rank 1 of group 'group-0' differs from its rank 0 in code, settings or hardware: "
        )
        assert re.search(f"this rank has {name} '.*', and rank 0 has '.*'", second.log()), second.log()
        assert first.process.returncode == AGAIN, first.log()
        assert first.steps() == []


@pytest.mark.parametrize(
    ("flags", "logged", "status"),
    [
        (("--overlap", "3"), "this rank has overlap '1', and rank 0 has '3'", AGAIN),
        # By SessionFailed, whose status only the launcher gives to the program.
        (("--checkpoints", "{folder}"), "this rank has checkpoints 'none', and rank 0 has 'some'", 1),
    ],
    ids=["overlap", "checkpoints"],
)
def test_what_rank_0_alone_would_do_with_others_is_refused_before_it_waits_for_them(
    flags: tuple[str, ...], logged: str, status: int, tmp_path: Path
) -> None:
    """With overlap it computes a first batch in a collective that no other rank comes to."""
    own = [flag.format(folder=tmp_path / "saved") for flag in flags]
    with cluster(tmp_path) as here:
        here.start_coordinator()
        group = start_ranks(here, "group-0", RANKS, ("--steps", str(STEPS)), own={0: own})
        first, second = group.ranks
        for worker in group.ranks:
            here.until(lambda worker=worker: worker.process.poll() is not None, "both ranks to end")
        assert second.process.returncode == 1, second.log()
        assert second.logged(logged), second.log()
        assert first.process.returncode == status, first.log()


@pytest.mark.parametrize(
    ("both", "last", "logged"),
    [
        (
            (),
            ("--count", "1"),
            r"The state's leaf \['count'\] has other values on some devices of group 'group-0'",
        ),
        (("--own-rows",), (), r"The batch's leaf \[0\] of step 0 and shard 0 has other values in rank 1"),
    ],
    ids=["state", "batch"],
)
def test_a_rank_with_other_values_than_its_rank_0_is_refused_before_it_trains(
    both: tuple[str, ...], last: tuple[str, ...], logged: str, tmp_path: Path
) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator()
        group = start(here, "group-0", *both, last=last)
        for worker in group.ranks:
            here.until(lambda worker=worker: worker.process.poll() is not None, "both ranks to end")
            assert worker.steps() == []
        assert group.ranks[1].process.returncode == 1, group.ranks[1].log()
        assert re.search(logged, group.ranks[1].log())


@pytest.mark.long
def test_a_rank_that_cannot_enter_its_manager_ends_at_once_with_its_own_status(tmp_path: Path) -> None:
    """JAX's exit handler would wait for rank 0, and be aborted as that ends: in fresh interpreters, which have it."""
    missing = ("--tls", *(str(tmp_path / name) for name in ("ca", "cert", "key")))
    with cluster(tmp_path) as here:
        here.start_coordinator()
        group = start(here, "group-0", "--failure-timeout-s", "10", last=missing, fresh=True)
        first, second = group.ranks
        here.until(lambda: second.process.poll() is not None, "rank 1 to end")
        assert second.process.returncode == 1, second.log()
        assert second.logged("cannot read the TLS certificate"), second.log()
        here.until(lambda: first.process.poll() is not None, "rank 0 to end")
        assert_ends_with_its_group(first, 0)


@pytest.mark.long
def test_a_rank_that_does_not_enter_its_manager_in_time_ends_its_group(tmp_path: Path) -> None:
    """The others wait for it in a collective, which nothing else can end."""
    with cluster(tmp_path) as here:
        here.start_coordinator()
        late = ("--enter", str(tmp_path / "never"))
        group = start(here, "group-0", "--failure-timeout-s", "3", last=late)
        here.until(lambda: group.leader.process.poll() is not None, "rank 0 to end")
        assert group.leader.process.returncode == AGAIN, group.leader.log()
        assert group.leader.logged("another rank is lost (it has not entered its Manager for 3 s)")


def test_a_rank_with_another_number_of_devices_ends_with_both(tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator()
        port = free_ports(1)[0]
        first, second = [
            here.start("group-0", "--world", f"{rank}:{RANKS}:{port}:{1 + 2 * rank}") for rank in range(RANKS)
        ]
        for worker in (first, second):
            here.until(lambda worker=worker: worker.process.poll() is not None, "both ranks to end")
        assert first.process.returncode == 1, first.log()
        assert first.logged("Rank 1 of this group has 3 devices, and its rank 0 has 1")
        # The same, unless JAX ends it before it gets there, because rank 0 has ended.
        assert second.process.returncode in (1, -signal.SIGABRT), second.log()
        assert "group-0 is present" not in here.coordinator_log.read_text()


@pytest.mark.long
def test_a_rank_that_hangs_costs_its_group_the_place_and_no_process(undisturbed: str, tmp_path: Path) -> None:
    """The other rank waits in a collective, and both go on saying that they live: progress alone shows it."""
    moves, back_in = tmp_path / "moves", tmp_path / "back"
    with cluster(tmp_path) as here:
        here.start_coordinator()
        hangs = {"group-1": ("--gate", f"{KILLED_AT}:{moves}")}
        groups = start_together(here, ("", 0, ""), "--gate", f"{LAST_GATE}:{back_in}", last=hangs)
        survivor, victim = groups["group-0"], groups["group-1"]
        here.until(
            lambda: "evicts group-1: it hangs" in here.coordinator_log.read_text(), "group-1 to be evicted"
        )
        here.until(lambda: len(survivor.leader.steps()) >= LAST_GATE, "the other group to go on")
        moves.touch()
        here.until(lambda: victim.leader.logged("heals to step"), "the group to heal")
        back_in.touch()
        here.until_finished(*survivor.ranks, *victim.ranks)
        assert {worker.digest for worker in (*survivor.ranks, *victim.ranks)} == {undisturbed}


@pytest.mark.long
def test_ranks_wait_for_a_coordinator_that_is_killed_and_go_on(undisturbed: str, tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        state = ("--state", str(tmp_path / "state"))
        here.start_coordinator(*state)
        assert here.coordinator is not None
        dead = here.coordinator
        murder = ("--murder", f"{dead.pid}:vote step {KILLED_AT}")
        groups = start_together(here, ("", 0, ""), last={"group-1": murder})
        here.until(lambda: dead.poll() is not None, "the coordinator to be killed")
        here.start_coordinator(*state, port=here.port)
        workers = [worker for group in groups.values() for worker in group.ranks]
        here.until_finished(*workers)
        assert {worker.digest for worker in workers} == {undisturbed}
        for worker in workers:
            steps = [event["step"] for event in worker.steps()]
            assert steps == sorted(set(steps))

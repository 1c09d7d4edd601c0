"""Two groups: a group dies in step 4, and is back before the other is allowed to go on."""

from collections.abc import Sequence
from pathlib import Path

from tests.clusters import Worker, cluster
from tests.processes.ranks import Group, start_ranks


def group_that_returns(folder: Path, flags: Sequence[str], *, die: str) -> tuple[Worker, Worker]:
    """Run workers with these flags up to the end; return the survivor, and the second life of the other.

    Args:
        folder: for their files.
        flags: of all workers, with at least 10 steps.
        die: the line of the library's log at which the group is killed.
    """
    started, back_in = folder / "started", folder / "back"
    flags = (*flags, "--gate", f"6:{started}", "--gate", f"9:{back_in}")
    with cluster(folder) as here:
        here.start_coordinator()
        groups = here.start_together(
            ("group-0", "group-1"), lambda group: (*flags, *(("--die", die) if group == "group-1" else ()))
        )
        here.until_dead(groups["group-1"])
        back = here.start("group-1", *flags)
        here.until(lambda: back.logged("heals to step"), "the group to heal")
        started.touch()
        # It may have come too late for the steps up to the gate, and waits for the one behind it.
        here.until(lambda: back.step >= 8 or back.logged("to enter the quorum"), "the group to take part")
        back_in.touch()
        here.until_finished(groups["group-0"], back)
    return groups["group-0"], back


def ranks_that_return(folder: Path, flags: Sequence[str], *, die: str) -> tuple[Group, Group]:
    """The same with groups of two processes, of which rank 1 is killed."""
    started, back_in = folder / "started", folder / "back"
    flags = (*flags, "--gate", f"6:{started}", "--gate", f"9:{back_in}")
    with cluster(folder) as here:
        here.start_coordinator()
        first = start_ranks(here, "group-0", 2, (*here.together, *flags))
        victim = start_ranks(here, "group-1", 2, (*here.together, *flags), own={1: ("--die", die)})
        here.begin_once_present("group-0", "group-1")
        here.until_dead(victim.ranks[1])
        here.until(lambda: victim.leader.process.poll() is not None, "its group to end")
        back = start_ranks(here, "group-1", 2, flags)
        here.until(lambda: back.leader.logged("heals to step"), "the group to heal")
        started.touch()
        here.until(
            lambda: back.leader.step >= 8 or back.leader.logged("to enter the quorum"),
            "the group to take part",
        )
        back_in.touch()
        here.until_finished(*first.ranks, *back.ranks)
    return first, back

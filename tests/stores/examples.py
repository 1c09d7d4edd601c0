"""Records, a few by hand and any by hypothesis."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from jaxft_coordinator.stores import Opened
from jaxft_protocol.coordinator import durable
from jaxft_protocol.coordinator.job import Forgotten, Frontier, Holder, Moved, Record, Saved
from jaxft_protocol.messages import GroupName, HistoryId, Incarnation, QuorumId, Step

WIDEST = (1 << 64) - 1


def saved(job: str = "llama", step: int = 0, **fields: Any) -> Saved:
    """A job of two groups at `step`."""
    members = (holder("group-0", 11), holder("group-1", 12))
    values: dict[str, Any] = {
        "last_quorum_id": QuorumId(7),
        "settings": {"program": "9e30145e"},
        "min_replicas": 1,
        "history": HistoryId(11),
        "frontier": Frontier(Step(step), QuorumId(7), None, frozenset(members)),
        "proven": dict(members),
        "distrusted": frozenset[Holder](),
        "members": members,
        "held": {GroupName("group-0"): (0, 1), GroupName("group-1"): (2, 3)},
        "places": 2,
        "finished": None,
        "total_shards": 4,
    }
    return Saved(job, **{**values, **fields})


def big(job: str, size: int) -> Saved:
    """A job that takes at least `size` bytes to write down."""
    return saved(job, settings={"padding": "x" * size})


def moved(step: int, job: str = "llama", quorum_id: int = 7) -> Moved:
    return Moved(job, Step(step), QuorumId(quorum_id))


def holder(group: str, incarnation: int) -> Holder:
    return GroupName(group), Incarnation(incarnation)


def folded(batches: Sequence[Sequence[Record]]) -> dict[str, Saved]:
    jobs: dict[str, Saved] = {}
    for batch in batches:
        for record in batch:
            jobs = durable.fold(jobs, record)
    return jobs


def step_of(opened: Opened, job: str = "llama") -> int:
    """The step that is remembered of `job`."""
    return frontier_of(opened.jobs[job])


def frontier_of(known: Saved) -> int:
    assert known.frontier is not None
    return known.frontier.step


# ---- any ----

numbers = st.integers(0, WIDEST) | st.sampled_from([0, 1, 1 << 32, 1 << 53, WIDEST])
# Anything that UTF-8 can hold: control characters too.
texts = st.text(max_size=20) | st.sampled_from(
    ["", "\n", "\x1ejax", "\0", '"', "\\", "é", "\U0001f525", "a/b"]
)
names = texts.map(GroupName)
holders = st.tuples(names, numbers.map(Incarnation))
steps = numbers.map(Step)
quorum_ids = numbers.map(QuorumId)
frontiers = st.builds(
    Frontier,
    steps,
    quorum_ids,
    st.none() | numbers,
    st.frozensets(holders, max_size=3),
    st.booleans(),
    st.booleans(),
)


def any_saved(jobs: st.SearchStrategy[str] = texts) -> st.SearchStrategy[Saved]:
    return st.builds(
        Saved,
        jobs,
        quorum_ids,
        st.none() | st.dictionaries(texts, texts, max_size=3),
        numbers,
        numbers.map(HistoryId),
        st.none() | frontiers,
        st.dictionaries(names, numbers.map(Incarnation), max_size=3),
        st.frozensets(holders, max_size=3),
        st.lists(holders, max_size=3).map(tuple),
        st.dictionaries(names, st.lists(numbers, max_size=3).map(tuple), max_size=3),
        numbers,
        st.none() | steps,
        st.none() | numbers,
        st.none() | numbers,
    )


def any_record(jobs: st.SearchStrategy[str] = texts) -> st.SearchStrategy[Record]:
    return st.builds(Moved, jobs, steps, quorum_ids) | st.builds(Forgotten, jobs) | any_saved(jobs)


@st.composite
def histories(draw: st.DrawFn) -> list[list[Record]]:
    """Appends as a coordinator makes them: a frontier moves only where there is one."""
    batches = draw(st.lists(st.lists(any_record(st.sampled_from(["a", "b", "a/b"])), max_size=3), max_size=8))
    jobs: dict[str, Saved] = {}
    kept: list[list[Record]] = []
    for batch in batches:
        kept.append([])
        for record in batch:
            known = jobs.get(record.job)
            if isinstance(record, Moved) and (known is None or known.frontier is None):
                continue
            jobs = durable.fold(jobs, record)
            kept[-1].append(record)
    return kept

"""Terms without a store are learned from the groups; with one, a coordinator that was replaced turns groups away."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxft_protocol.coordinator import durable
from jaxft_protocol.messages import Evicted, Heal, Welcome

from tests.protocol.coordinator.helpers import Desk, members

TERM = 100  # by the clock


def fresh(**options: float) -> Desk:
    """A coordinator that has just started."""
    return Desk.open(**{"min_replicas": 1, "term": TERM, **options})


def welcomed(desk: Desk, name: str, term: int, incarnation: int = 1) -> int | None:
    """The term under which a group that has met `term` is welcomed; None if it is turned away."""
    done = desk.hello(name, incarnation, term=term)
    heard = done.only(Welcome)[name].term
    assert (name in desk.job.groups) == (heard >= term)
    if heard < term:
        assert done.closed == [name]
        desk.sessions.pop(name)
        return None
    return heard


@pytest.mark.parametrize("met", [TERM, TERM + 1, TERM + 10**9])
def test_a_clock_that_is_behind_works_at_once(met: int):
    desk = fresh()
    assert welcomed(desk, "a", met) == met + 1
    assert welcomed(desk, "b", met) == met + 1
    assert welcomed(desk, "c", 0) == met + 1
    desk.join("a", step=7, digest="", history=3)
    desk.join("b", step=7, digest="", history=3)


@pytest.mark.parametrize("met", [0, 1, TERM - 1])
def test_a_clock_that_is_right_is_believed(met: int):
    desk = fresh()
    assert welcomed(desk, "a", met) == TERM


def test_of_several_terms_the_highest_is_topped_and_all_come_under_one():
    desk = fresh(min_replicas=3)
    assert welcomed(desk, "a", 200) == 201
    desk.join("a", step=3, digest="", history=9)
    assert welcomed(desk, "b", 150) == 201
    done = desk.hello("c", term=300)
    assert done.only(Welcome)["c"].term == 301
    assert sorted(done.closed) == ["a", "b"]
    assert all(evicted.may_return for evicted in done.only(Evicted).values())
    assert welcomed(desk, "a", 201) == 301
    assert welcomed(desk, "b", 201) == 301


def test_one_that_has_founded_the_job_turns_a_later_term_away_at_first():
    """This coordinator may have been replaced: then the other one leads, and the group finds it."""
    desk = fresh()
    desk.come("a")
    desk.commit()
    assert welcomed(desk, "b", 200) is None
    assert members(desk) == ["a"], "nothing has happened to the others"
    desk.wait(60.0)
    assert welcomed(desk, "b", 200) is None, "it has found the other one meanwhile, and lost it again"
    assert desk.commit()


def test_where_nobody_leads_them_it_begins_again_with_what_they_bring():
    desk = fresh()
    desk.come("a")
    desk.commit()
    quorum_id = desk.quorum.quorum_id
    for _ in range(6):
        assert welcomed(desk, "b", 200) is None
        desk.wait(0.8)
    desk.wait(0.3)
    done = desk.hello("b", term=200)
    assert done.only(Welcome)["b"].term == 201
    assert done.closed == ["a"]
    heard = done.only(Evicted)["a"]
    assert heard.may_return
    assert "group 'b' has met a coordinator of term 200" in heard.reason
    assert desk.job.frontier is None
    assert desk.job.last_quorum_id == quorum_id
    desk.join("b", step=40, digest="", history=9)
    desk.wait(70.0)
    assert (members(desk), desk.step) == (["b"], 40)
    assert desk.quorum.quorum_id > quorum_id


def test_with_a_store_nothing_is_learned():
    """A higher term than the store's belongs to a coordinator which has taken the store over."""
    desk = fresh(durable=True)
    for _ in range(30):
        assert welcomed(desk, "a", TERM + 1) is None
        desk.wait(1.0)
    assert welcomed(desk, "b", TERM) == TERM


def test_with_a_store_it_says_once_what_to_do_if_no_other_leads():
    """Such as on an emptied folder, on a machine whose clock is behind."""
    desk = fresh(durable=True)
    logged: list[str] = []
    for _ in range(30):
        logged += desk.hello("a", term=TERM + 1).reports
        desk.job = durable.emptied(desk.job)  # as the shell does
        desk.wait(1.0)
    assert logged == [
        f"[job] turns a away: it has met a coordinator of term {TERM + 1}, and this one has term {TERM} from its "
        "store. If no other coordinator leads, this store was emptied or restored, and the clock of this machine is "
        "behind: set it right, and restart this coordinator"
    ]


def test_one_that_is_turned_away_does_not_take_the_place_of_another():
    desk = fresh(durable=True)
    desk.come("a")
    desk.hello("a", 2, term=TERM + 1)
    assert desk.group("a").incarnation == 1


def test_a_heal_id_is_not_given_out_twice_when_a_job_begins_again():
    desk = fresh()
    desk.come("a")
    first = desk.come("b", digest="other").only(Heal)["b"].heal_id
    for _ in range(60):
        if welcomed(desk, "c", 200) is not None:
            break
        desk.wait(0.5)
    desk.join("c")
    second = desk.come("b", digest="other", incarnation=2)
    assert second.only(Heal)["b"].heal_id > first


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 400), st.floats(0.0, 8.0)), max_size=20))
def test_nobody_is_welcomed_under_a_lower_term_than_it_has_met(course: list[tuple[str, int, float]]):
    """In no open session does a group get messages of a term below its own."""
    desk = fresh()
    met: dict[str, int] = {}
    for incarnation, (name, term, pause_s) in enumerate(course):
        term = max(term, met.get(name, 0))
        if name in desk.job.groups:
            desk.close(name)
        heard = welcomed(desk, name, term, incarnation + 1)
        if heard is not None:
            assert heard >= term
            met[name] = heard
            desk.join(name)
        assert all(met[group] == desk.job.term for group in desk.job.groups)
        desk.wait(pause_s)

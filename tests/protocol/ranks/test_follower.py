"""The core of every rank but 0: it takes rank 0's orders one by one, and is stopped in its operation alone."""

import pytest
from jaxft_protocol.messages import QuorumId, Step
from jaxft_protocol.ranks import follower as core
from jaxft_protocol.ranks.follower import Begins, Done, Follower, Heard, Interrupt, Leaves, Report, take
from jaxft_protocol.ranks.messages import (
    CameApart,
    Decided,
    Directed,
    Judged,
    Order,
    Outcome,
    StopWork,
    Verdict,
)
from jaxft_protocol.replica.state import Apply

APPLY = Directed(Apply(QuorumId(3), Step(5)))


def after(*events: core.Event) -> tuple[Follower, list[core.Effect]]:
    follower, done = Follower(1), list[core.Effect]()
    for event in events:
        follower, effects = core.step(follower, event)
        done += effects
    return follower, done


def heard(*orders: Order) -> Follower:
    return after(*map(Heard, orders))[0]


def test_orders_are_taken_in_their_order() -> None:
    orders = (APPLY, Decided("go on", value=True), Judged("heal#1", Verdict("broke")), Directed(None))
    follower, taken = heard(*orders), list[Order | None]()
    for order in orders:
        about = "" if isinstance(order, Directed) else order.what
        follower, found = take(follower, type(order), about)
        taken.append(found)
    assert taken == list(orders)
    assert take(follower, Directed, "")[1] is None


@pytest.mark.parametrize(
    ("order", "kind", "about", "words"),
    [
        (Decided("go on"), Decided, "exchange", r"the decision about 'go on' .* is at 'exchange'"),
        (Decided("go on"), Judged, "go on", "the decision about 'go on'"),
        (APPLY, Decided, "go on", r"the directive Apply .* is at 'go on'"),
        (Judged("heal#1", Verdict()), Judged, "heal#2", r"the verdict about 'heal#1' .* is at 'heal#2'"),
        (Judged("heal#1", Verdict()), Directed, "", r"the verdict .* is waiting for what comes next"),
        (Directed(None), Decided, "exchange", "the end of the job"),
    ],
)
def test_an_order_for_another_point_of_the_program_is_not_taken(
    order: Order, kind: type[Order], about: str, words: str
) -> None:
    with pytest.raises(CameApart, match=words) as caught:
        take(heard(order, APPLY), kind, about)
    assert caught.value.theirs == (order.what if isinstance(order, Decided) else "")


def test_operations_are_numbered_and_reported_by_their_names() -> None:
    broke = Verdict("its link broke", ("b",))
    follower, effects = after(Begins("exchange"), Done(broke), Leaves(), Begins("heal"), Done(Verdict()))
    assert effects == [Report(Outcome("exchange#1", broke)), Report(Outcome("heal#2", Verdict()))]
    assert core.step(follower, Leaves())[0].what == ""


def test_work_is_stopped_in_its_operation_and_in_no_other() -> None:
    stop = Heard(StopWork("exchange#1"))
    assert after(Begins("exchange"), stop)[1] == [Interrupt()]
    assert after(stop, Begins("exchange"))[1] == [Interrupt()]
    assert after(Begins("exchange"), Leaves(), stop, Begins("exchange"))[1] == []
    assert after(Begins("exchange"), Heard(StopWork("exchange#2")))[1] == []


def test_a_stop_overtakes_the_orders() -> None:
    follower, effects = after(Begins("exchange"), Heard(APPLY), Heard(StopWork("exchange#1")))
    assert effects == [Interrupt()]
    assert take(follower, Directed, "")[1] == APPLY

"""Ctrl-C at the moments at which a state is consumed or a report is on its way: the next call continues."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxft_protocol.replica.state import Applied, Event, Exchanged, Prepared

import jaxft
from jaxft._programs._programs import Programs
from jaxft._replica._catch_up import CatchUp
from jaxft._replica._saving import Saving
from jaxft._session._mailbox import Mailbox
from jaxft._step import Step
from tests import patience
from tests.clusters import Cluster, cluster
from tests.interrupts import interrupted


def train_step(state: Any, batch: jax.Array) -> tuple[Any, Any]:
    means = jaxft.pmean(batch)
    return {"w": state["w"] + means, "n": state["n"] + 1}, {}


def batch_for(_step: int, _shard: int) -> np.ndarray:
    return np.ones(3, np.float32)


def initial() -> dict[str, jax.Array]:
    return {"w": jnp.zeros(3), "n": jnp.int32(0)}


class Once:
    """Sends Ctrl-C to this thread once it is armed, and only once."""

    def __init__(self) -> None:
        self.armed = False

    def __call__(self) -> None:
        if self.armed:
            self.armed = False
            signal.raise_signal(signal.SIGINT)


def in_apply(patch: pytest.MonkeyPatch, once: Once) -> None:
    """As when it comes within the program: Python takes it once that has returned, and drops its results."""
    apply = Programs.apply

    def interrupted_apply(self: Programs, *rest: Any) -> Any:
        found = apply(self, *rest)
        once()
        return found

    patch.setattr(Programs, "apply", interrupted_apply)


def at(kind: type, *, after: bool) -> Callable[[pytest.MonkeyPatch, Once], None]:
    """Before or after a report to the session's thread."""

    def patched(patch: pytest.MonkeyPatch, once: Once) -> None:
        post = Mailbox.post

        def interrupted_post(self: Mailbox, event: Event) -> None:
            if isinstance(event, kind) and not after:
                once()
            post(self, event)
            if isinstance(event, kind) and after:
                once()

        patch.setattr(Mailbox, "post", interrupted_post)

    return patched


def test_alone_no_state_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    once = Once()
    in_apply(monkeypatch, once)
    step = jaxft.fault_tolerant(train_step, manager=None, shards=2)
    state, _ = step(initial(), batch_for)
    once.armed = True
    with interrupted():
        step(state, batch_for)
    assert step.step == 2
    state, _ = step(state, batch_for)
    assert (int(state["n"]), state["w"].tolist(), step.step) == (3, [3.0] * 3, 3)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as made:
        made.start_coordinator()
        yield made


def manager(here: Cluster, group: str = "group-0") -> jaxft.Manager:
    return jaxft.Manager(f"localhost:{here.port}", group=group, failure_timeout_s=60.0)


@contextlib.contextmanager
def another_group(here: Cluster) -> Iterator[None]:
    """Trains in a thread, from the first step on."""
    began, stop = threading.Event(), threading.Event()

    def train() -> None:
        with manager(here, "group-1") as job:
            step = jaxft.fault_tolerant(train_step, job, shards=2)
            state = step.join(initial(), batch_for)
            while not stop.is_set():
                state, _ = step(state, batch_for)
                began.set()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        assert began.wait(patience.FAR_S)
        yield
    finally:
        stop.set()
        thread.join()


def interrupt_once(patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Ctrl-C as soon as the next call of a method in this thread has returned."""
    called, mine = getattr(owner, name), threading.current_thread()

    def interrupted_call(*rest: Any, **named: Any) -> Any:
        found = called(*rest, **named)
        if threading.current_thread() is mine:
            patch.setattr(owner, name, called)
            signal.raise_signal(signal.SIGINT)
        return found

    patch.setattr(owner, name, interrupted_call)


HEALS = (CatchUp, "heal")
WAITS = (Mailbox, "wait")
RETURNS = (Step, "_whole")


@pytest.mark.processes
@pytest.mark.parametrize("joins", [True, False], ids=["join", "step"])
@pytest.mark.parametrize(
    "moments",
    [(HEALS,), (HEALS, WAITS, RETURNS)],
    ids=lambda moments: " ".join(name for _, name in moments),
)
def test_a_state_that_a_heal_has_replaced_is_known_until_a_call_returns_it(
    here: Cluster, monkeypatch: pytest.MonkeyPatch, moments: tuple[tuple[type, str], ...], *, joins: bool
) -> None:
    """However often Ctrl-C comes meanwhile. A heal consumes no state, so the loop has an older one."""
    with another_group(here), manager(here) as job:
        step = jaxft.fault_tolerant(train_step, job, shards=2)
        state = initial()
        if not joins:
            state = step.join(state, batch_for)
            assert job.step > 0  # as a loop that follows the job does
            state, _ = step(state, batch_for)
            interrupt_once(monkeypatch, Programs, "compute")  # the other group continues
            with interrupted():
                step(state, batch_for)
        for owner, name in moments:
            interrupt_once(monkeypatch, owner, name)
            assert job.step >= 0
            with interrupted():
                step.join(state, batch_for) if joins else step(state, batch_for)
        assert job.step > 0
        state = step.join(state, batch_for) if joins else step(state, batch_for)[0]
        assert int(state["n"]) == job.step == state["w"][0]


@pytest.mark.processes
@pytest.mark.parametrize(
    "moment",
    [in_apply, at(Exchanged, after=False), at(Applied, after=True)],
    ids=["in apply", "before the vote", "after applied"],
)
def test_in_a_job_the_next_call_goes_on(
    here: Cluster, monkeypatch: pytest.MonkeyPatch, moment: Callable[[pytest.MonkeyPatch, Once], None]
) -> None:
    once = Once()
    moment(monkeypatch, once)
    with manager(here) as job:
        step = jaxft.fault_tolerant(train_step, job, shards=2)
        state = step.join(initial(), batch_for)
        state, _ = step(state, batch_for)
        for _ in range(3):
            once.armed = True
            with interrupted():
                state, _ = step(state, batch_for)
            state, _ = step(state, batch_for)
            assert int(state["n"]) == job.step == state["w"][0]


@pytest.mark.processes
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "job"])
def test_join_returns_the_state_of_a_last_step_that_was_interrupted(
    here: Cluster, monkeypatch: pytest.MonkeyPatch, *, alone: bool
) -> None:
    """No call of the step is left that would."""
    once = Once()
    in_apply(monkeypatch, once)
    with contextlib.nullcontext() if alone else manager(here) as job:
        step = jaxft.fault_tolerant(train_step, job, shards=2)
        state = step.join(initial(), batch_for)
        with interrupted():
            for number in step.steps(3):
                once.armed = number == 2
                state, _ = step(state, batch_for)
        assert list(step.steps(3)) == []
        state = step.join(state, batch_for)
        assert int(state["n"]) == step.step == 3


@pytest.mark.processes
def test_before_and_after_the_first_report_a_call_is_made_again(
    here: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = Once()
    at(Prepared, after=True)(monkeypatch, once)
    with manager(here) as job:
        step = jaxft.fault_tolerant(train_step, job, shards=2)
        once.armed = True
        with interrupted():
            step.join(initial(), batch_for)
        state = step.join(initial(), batch_for)
        state, _ = step(state, batch_for)
        assert (int(state["n"]), job.step) == (1, 1)


@pytest.mark.processes
def test_a_first_call_that_is_refused_is_refused_again(
    here: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as for a checkpoint of other settings. The second call would wait for an answer to no report."""

    def refuse(_self: Saving, _settings: object) -> None:
        raise jaxft.ConfigurationError("the checkpoint has other settings")

    with manager(here) as job:
        step = jaxft.fault_tolerant(train_step, job, shards=2)
        with monkeypatch.context() as patch:
            patch.setattr(Saving, "check", refuse)
            for _ in range(2):
                with pytest.raises(jaxft.ConfigurationError, match="other settings"):
                    step.join(initial(), batch_for)
        state = step.join(initial(), batch_for)
        state, _ = step(state, batch_for)
        assert job.step == 1


def test_an_edit_is_made_once_if_the_call_fails_before_it_begins() -> None:
    """As for a static argument that cannot be hashed, or a batch function that fails when its types are asked for."""
    fails = [False]

    def sometimes(step: int, _shard: int) -> np.ndarray:
        if fails[0]:
            fails[0] = False
            raise OSError("no batch now")
        return np.ones(4 if step == 2 else 3, np.float32)

    def step_of(state: Any, batch: jax.Array, _kind: str) -> tuple[Any, Any]:
        return {"rate": state["rate"] + 0 * jaxft.pmean(jnp.mean(batch))}, {}

    step = jaxft.fault_tolerant(step_of, manager=None, shards=1, static_argnums=2)
    state = step.join({"rate": jnp.float32(1.0)}, sometimes, "a")
    for number in step.steps(3):
        for attempt in range(2):
            if number == 2:
                state = step.edit(state, lambda state: {"rate": state["rate"] / 2})
            fails[0] = number == 2 and attempt == 0
            try:
                state, _ = step(state, sometimes, "b" if number == 2 else "a")
                break
            except OSError:
                continue
    assert float(state["rate"]) == 0.5


@pytest.mark.processes
def test_after_the_vote_no_edit_is_made_the_group_writes_and_its_state_is_saved(
    here: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    once = Once()
    at(Exchanged, after=True)(monkeypatch, once)
    checkpoints = jaxft.Checkpoints(tmp_path / "checkpoints", every_steps=2)
    with jaxft.Manager(
        f"localhost:{here.port}", group="group-0", failure_timeout_s=60.0, checkpoints=checkpoints
    ) as job:
        step = jaxft.fault_tolerant(train_step, job, shards=2)
        state = step.join(job.restore(initial()), batch_for)
        for _ in step.steps(1):
            state, _ = step(state, batch_for)
        numbers = step.steps(2)
        next(numbers)
        once.armed = True
        with interrupted():
            step(state, batch_for)
        with pytest.raises(jaxft.ConfigurationError, match="The vote of group 'group-0' on step 1 is out"):
            step.edit(state, lambda state: {**state, "n": state["n"] + 10})
        once.armed = False
        at(Applied, after=True)(monkeypatch, once)
        once.armed = True
        with interrupted():
            step(state, batch_for)
        assert job.is_writer
    assert checkpoints.steps() == [2]

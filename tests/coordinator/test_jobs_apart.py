"""Jobs stand apart: what goes wrong in one stops that one, and no number of them locks out the next."""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from jaxft_coordinator.shell import _jobs, limits
from jaxft_coordinator.shell._jobs import Jobs
from jaxft_coordinator.shell._leading import Leading
from jaxft_coordinator.stores import FileStore, Store, records
from jaxft_protocol.coordinator import machine
from jaxft_protocol.coordinator.job import (
    Close,
    Effect,
    Options,
    Received,
    Send,
    SessionClosed,
    SessionId,
    Tick,
)
from jaxft_protocol.messages import (
    Commit,
    Evicted,
    GroupMessage,
    GroupName,
    Halted,
    HaltKind,
    Heartbeat,
    Hello,
    Incarnation,
    Join,
    Leave,
    NewQuorum,
    QuorumId,
    Refused,
    Step,
    Vote,
    Welcome,
)
from jaxft_protocol.values import changed

from tests import patience
from tests.coordinator.test_journal import HeldStore, turns
from tests.protocol.coordinator.helpers import digest_of
from tests.stores import examples, scenarios


class Desk:
    """Speaks for the groups of many jobs, each in one session."""

    def __init__(self, store: Store | None, *, tick_s: float = 0.01, **settings: Any) -> None:
        self.output: list[tuple[SessionId, object]] = []
        self.led = asyncio.Event()
        self._more = asyncio.Event()
        self._sessions: dict[tuple[str, str], SessionId] = {}
        options = Options(
            **{
                "min_replicas": 1,
                "heartbeat_timeout_s": 60.0,
                "founding_wait_s": 0.0,
                **settings.pop("options", {}),
            }
        )
        self.jobs = Jobs(options, self, **settings)
        self.leading = Leading(self.jobs, store, self, tick_s=tick_s)

    def leads(self) -> None:
        self.led.set()

    def stands_down(self, reason: str) -> None:
        pass

    def sessions_of(self, job: str) -> list[SessionId]:
        ended = {session for session, message in self.output if message == "closed"}
        return [session for (of, _), session in self._sessions.items() if of == job and session not in ended]

    def do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.output.append((effect.session, effect.message))
            elif isinstance(effect, Close):
                self.output.append((effect.session, "closed"))
        self._more.set()

    def session(self, job: str, name: str) -> SessionId:
        return self._sessions[job, name]

    def say(self, job: str, name: str, message: GroupMessage) -> None:
        self.jobs.step(job, Received(self.session(job, name), message))

    def come(
        self, job: str, name: str, *, incarnation: int = 1, step: int = 0, digest: str = "d", **join: Any
    ) -> None:
        self._sessions[job, name] = SessionId(len(self.output) + 1000 * len(self._sessions) + 1)
        self.say(job, name, Hello(job, GroupName(name), Incarnation(incarnation), f"{name}:1"))
        if self.jobs.get(job) is not None:
            self.say(job, name, Join(Step(step), digest_of(digest), **{"total_shards": 2, **join}))

    def close(self, job: str, name: str) -> None:
        self.jobs.step(job, SessionClosed(self.session(job, name), "its connection closed"))

    def heard(self, job: str, name: str) -> list[object]:
        return [message for session, message in self.output if session == self.session(job, name)]

    async def hears(self, job: str, name: str, kind: type) -> Any:
        while True:
            for message in reversed(self.heard(job, name)):
                if isinstance(message, kind):
                    return message
            self._more.clear()
            await self._more.wait()

    async def commits(self, job: str, name: str) -> Commit:
        """Let the only group of a job commit a step."""
        quorum = await self.hears(job, name, NewQuorum)
        state = self.jobs.get(job)
        assert state is not None
        assert state.frontier is not None
        step = state.frontier.step
        self.say(job, name, Vote(quorum.quorum_id, step, ok=True))
        while True:
            commit = await self.hears(job, name, Commit)
            if commit.step == step:
                return commit
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def leading(store: Store | None, **settings: Any) -> AsyncIterator[Desk]:
    desk = Desk(store, **settings)
    running = asyncio.create_task(desk.leading.run("here:1"))
    try:
        await desk.led.wait()
        yield desk
        assert not running.done(), running
        await desk.leading.flush(30.0)
    finally:
        running.cancel()
        await asyncio.wait([running])
        await desk.leading.close()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(patience.FAR_S):
            await scenario()

    asyncio.run(bounded())


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.005)


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store | None:
    return FileStore(tmp_path) if request.param == "file" else None


# ---- a turn that raises ----


def faulty(job: str, kind: type) -> Callable[..., Any]:
    """A machine that has an error: it fails on these events of this job."""
    step = machine.step

    def fails(before: Any, event: Any, now_s: float) -> Any:
        if before.name == job and isinstance(getattr(event, "message", event), kind):
            raise KeyError("no such group")
        return step(before, event, now_s)

    return fails


@pytest.mark.parametrize("kind", [Tick, Vote, Heartbeat, SessionClosed, Leave])
def test_a_turn_that_raises_stops_its_job_and_no_other(
    store: Store | None, kind: type, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async def scenario() -> None:
        async with leading(store) as desk:
            for job in ("bad", "good"):
                desk.come(job, "a")
                await desk.commits(job, "a")
            desk.come("bad", "b", digest="fresh")
            with monkeypatch.context() as patch:
                patch.setattr(_jobs.machine, "step", faulty("bad", kind))
                if kind is SessionClosed:
                    desk.close("bad", "b")
                elif kind is not Tick:
                    messages = (Vote(QuorumId(0), Step(0), ok=True), Heartbeat(), Leave(finished=True))
                    desk.say("bad", "a", next(each for each in messages if type(each) is kind))
                halted = await desk.hears("bad", "a", Halted)
                assert halted.kind is HaltKind.FAILED
                assert (
                    f"the coordinator failed to handle a {kind.__name__} (KeyError: 'no such group')"
                    in halted.reason
                )
                assert desk.heard("bad", "a")[-1] == "closed"
                assert desk.heard("bad", "b")[-1] == "closed"
                for _ in range(3):
                    await desk.commits("good", "a")
                await asyncio.sleep(0.2)  # twenty ticks
            output = [each for each in caplog.records if "[bad] stops" in each.getMessage()]
            assert len(output) == 1, "not at each tick"
            assert output[0].exc_info is not None
            assert desk.jobs.failures == {"bad": 1}
            # It continues from its last record.
            history = desk.jobs.get("bad").history  # pyright: ignore[reportOptionalMemberAccess]
            desk.come("bad", "a", step=1, digest="", history=history)
            quorum = await desk.hears("bad", "a", NewQuorum)
            assert quorum.step == 1
            assert quorum.quorum_id == 2
            assert not any(isinstance(message, Halted) for message in desk.heard("good", "a"))

    with caplog.at_level(logging.ERROR, "jaxft_coordinator"):
        run(scenario)


def test_a_group_on_whose_hello_the_coordinator_fails_hears_of_it(
    store: Store | None, monkeypatch: pytest.MonkeyPatch
):
    async def scenario() -> None:
        async with leading(store) as desk:
            desk.come("bad", "a")
            with monkeypatch.context() as patch:
                patch.setattr(_jobs.machine, "step", faulty("bad", Hello))
                desk._sessions["bad", "b"] = SessionId(77)
                desk.say("bad", "b", Hello("bad", GroupName("b"), Incarnation(1), "b:1"))
                await desk.hears("bad", "b", Halted)
                await desk.hears("bad", "a", Halted)
            desk.come("bad", "b")
            await desk.hears("bad", "b", Welcome)

    run(scenario)


def test_what_cannot_be_told_stops_its_job(store: Store | None, monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> None:
        async with leading(store) as desk:
            do = desk.do

            def fails(effects: Sequence[Effect]) -> None:
                if any(isinstance(each, Send) and isinstance(each.message, NewQuorum) for each in effects):
                    raise ValueError("it does not fit into its field")
                do(effects)

            monkeypatch.setattr(desk, "do", fails)
            desk.come("bad", "a")
            halted = await desk.hears("bad", "a", Halted)
            assert "to announce a decision (ValueError: it does not fit into its field)" in halted.reason
            monkeypatch.setattr(desk, "do", do)
            desk.come("good", "a")
            await desk.commits("good", "a")

    run(scenario)


# ---- a record that cannot be written down ----


def test_a_founder_that_leaves_before_the_first_quorum_stops_nobody(tmp_path: Path):
    """The coordinator ended with status 1, and again after each restart when the same groups came."""

    async def life(other: str) -> None:
        async with leading(FileStore(tmp_path), options={"min_replicas": 2}) as desk:
            desk.come("bad", "a", digest="one")
            desk.come("bad", "b", digest="another")
            desk.say("bad", "a", Leave(finished=True))
            await desk.leading.flush(30.0)
            desk.come(other, "a", min_replicas=1)
            await desk.commits(other, "a")

    run(lambda: life("good"))
    run(lambda: life("another"))


def test_what_one_session_provokes_ends_that_session(store: Store | None):
    async def scenario() -> None:
        async with leading(store) as desk:
            desk.come("bad", "a")
            await desk.commits("bad", "a")
            desk.come("bad", "b", digest="fresh")
            job = desk.jobs.get("bad")
            assert job is not None
            desk.jobs._jobs["bad"] = changed(job, places=0)  # as a fault would leave it
            with pytest.raises(machine.IllegalEvent, match="places would be -1"):
                desk.say("bad", "a", Leave(finished=True))
            assert desk.jobs.get("bad") is not None
            assert desk.jobs.failures == {}

    run(scenario)


def test_a_job_whose_record_the_store_refuses_goes_on_from_the_last_one(tmp_path: Path):
    class Picky(FileStore):
        refuses = False

        async def append(self, records: Any) -> None:
            if self.refuses and any(record.job == "bad" for record in records):
                raise ValueError("places is -1, not a whole number")
            await super().append(records)

    async def scenario() -> None:
        store = Picky(tmp_path)
        async with leading(store) as desk:
            for job in ("bad", "good"):
                desk.come(job, "a")
                await desk.commits(job, "a")
            store.refuses = True
            job = desk.jobs.get("bad")
            assert job is not None
            desk.say("bad", "a", Vote(job.last_quorum_id, Step(1), ok=True))
            halted = await desk.hears("bad", "a", Halted)
            assert "to record a decision, which its store refuses (ValueError: places is -1" in halted.reason
            await desk.commits("good", "a")
            store.refuses = False
            again = desk.jobs.get("bad")
            assert again is not None
            assert again.frontier is not None
            assert again.frontier.step == 1, "only durable steps have happened"
            desk.come("bad", "a", step=1, digest="", history=again.history)
            await desk.commits("bad", "a")

    run(scenario)


def test_a_session_whose_end_was_dropped_with_a_refused_record_is_ended(tmp_path: Path):
    """The job has ended it already, and forgets it; else its heartbeats would be answered forever."""

    class Picky(FileStore):
        refuses = False

        async def append(self, records: Any) -> None:
            if self.refuses:
                raise ValueError("places is -1, not a whole number")
            await super().append(records)

    async def scenario() -> None:
        store = Picky(tmp_path)
        async with leading(store, options={"min_replicas": 2}) as desk:
            for name in ("a", "b"):
                desk.come("job", name)
            quorum = await desk.hears("job", "a", NewQuorum)
            store.refuses = True
            for name in ("a", "b"):
                desk.say("job", name, Vote(quorum.quorum_id, Step(0), ok=True))
            assert desk.jobs.evict("job", GroupName("b"), "a test evicts it") == ""
            for name in ("a", "b"):
                await desk.hears("job", name, Halted)
                assert "closed" in desk.heard("job", name)

    run(scenario)


def test_groups_of_a_job_that_does_not_read_are_told_why_and_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async def scenario() -> None:
        async with leading(FileStore(tmp_path)) as desk:
            desk.come("good", "a")
            await desk.commits("good", "a")
        bad = records.encode(examples.saved("bad")).replace(b'"places":2', b'"places":-1')
        scenarios.put(tmp_path / "decisions.sqlite3", "saved/bad", bad)
        async with leading(FileStore(tmp_path)) as desk:
            refusal = desk.jobs.refusal("bad")
            assert re.search("the record of job 'bad' cannot be read .*places is -1", refusal)
            assert refusal in caplog.messages, "before a group asks"
            assert desk.jobs.refusal("good") == ""
            job = desk.jobs.get("good")
            assert job is not None
            desk.come("good", "a", step=1, digest="", history=job.history)
            await desk.commits("good", "a")
        assert "places is -1" in (await FileStore(tmp_path).open("a:1")).unreadable["bad"], "it is kept"

    run(scenario)


# ---- how many jobs, and for how long ----


async def finishes(desk: Desk, job: str) -> None:
    desk.come(job, "a")
    await desk.commits(job, "a")
    desk.say(job, "a", Leave(finished=True))
    await until(lambda: desk.jobs.get(job).groups == {})  # pyright: ignore[reportOptionalMemberAccess]
    await until(lambda: desk.jobs.get(job).idle_since)  # pyright: ignore[reportOptionalMemberAccess]


def test_the_last_job_that_fits_is_not_the_last_that_is_taken_over_restarts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "MAX_JOBS", 3)

    async def life(number: int) -> None:
        async with leading(FileStore(tmp_path)) as desk:
            for index in range(4):
                name = f"job-{number}-{index}"
                assert desk.jobs.refusal(name) == ""
                await finishes(desk, name)
            assert len(desk.jobs) == 3
            assert desk.jobs.get(f"job-{number}-0") is None

    for number in range(3):
        run(lambda number=number: life(number))

    async def last() -> None:
        opened = await FileStore(tmp_path).open("a:1")
        assert sorted(opened.jobs) == ["job-2-1", "job-2-2", "job-2-3"]

    run(last)


def test_jobs_with_groups_are_never_forgotten_for_others(
    store: Store | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "MAX_JOBS", 2)

    async def scenario() -> None:
        async with leading(store) as desk:
            for job in ("one", "two"):
                desk.come(job, "a")
                await desk.commits(job, "a")
            assert "this coordinator serves 2 jobs, its limit" in desk.jobs.refusal("three")
            assert desk.jobs.refusal("one") == ""
            desk.close("one", "a")
            await until(lambda: desk.jobs.refusal("three") == "")
            desk.come("three", "a")
            assert desk.jobs.get("one") is None
            await desk.commits("two", "a")

    run(scenario)


def test_first_goes_what_holds_nothing_then_what_has_finished_then_what_was_given_up(
    store: Store | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "MAX_JOBS", 3)

    async def scenario() -> None:
        async with leading(store) as desk:
            desk.come("given up", "a")
            await desk.commits("given up", "a")
            desk.close("given up", "a")
            await finishes(desk, "finished")
            desk.come("empty", "a")
            desk.close("empty", "a")
            await until(lambda: all(desk.jobs.get(job).idle_since for job in ("given up", "empty")))  # pyright: ignore
            for number, gone in enumerate(("empty", "finished", "given up")):
                assert desk.jobs.get(gone) is not None
                desk.come(f"new {number}", "a")
                assert desk.jobs.get(gone) is None
            assert desk.jobs.refusal("one more") != ""

    run(scenario)


def test_a_finished_job_is_forgotten_after_a_while_over_restarts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_jobs, "_FORGET_EVERY_S", 0.0)
    clock = time.time()
    monkeypatch.setattr(time, "time", lambda: clock)

    async def life(expected: set[str]) -> None:
        async with leading(FileStore(tmp_path), forget_after_s=100.0) as desk:
            await asyncio.sleep(0.1)  # ten ticks
            assert {job for job in ("finished", "given up") if desk.jobs.get(job)} == expected

    async def first() -> None:
        async with leading(FileStore(tmp_path), forget_after_s=100.0) as desk:
            await finishes(desk, "finished")
            desk.come("given up", "a")
            await desk.commits("given up", "a")

    run(first)
    clock += 99
    run(lambda: life({"finished", "given up"}))
    clock += 2
    run(lambda: life({"given up"}))
    clock += 1e9
    run(lambda: life({"given up"}))


def test_a_group_that_comes_late_to_a_finished_job_is_told_and_the_time_begins_again(store: Store | None):
    async def scenario() -> None:
        async with leading(store) as desk:
            await finishes(desk, "job")
            job = desk.jobs.get("job")
            assert job is not None
            assert job.idle_since is not None
            desk.come("job", "b", digest="fresh")
            job = desk.jobs.get("job")
            assert job is not None
            assert job.idle_since is None
            assert job.finished == 1

    run(scenario)


# ---- while a record is being written ----


def on_a_held_store(scenario: Callable[[HeldStore, Desk], Awaitable[None]], **settings: Any) -> None:
    async def held() -> None:
        store = HeldStore()
        async with leading(store, **settings) as desk:
            await scenario(store, desk)

    run(held)


def test_what_a_group_says_before_it_hears_that_it_is_out_means_nothing():
    async def scenario(store: HeldStore, desk: Desk) -> None:
        desk.come("job", "a")
        desk.come("job", "b", total_shards=0)  # its refusal waits behind the record of the founding
        desk.say("job", "b", Heartbeat())
        await turns()
        assert not any(message == "closed" for _, message in desk.output)
        store.gate.set()
        await turns()
        assert any(isinstance(message, NewQuorum) for message in desk.heard("job", "a"))
        assert "closed" not in desk.heard("job", "a")
        *_, refused, closed = desk.heard("job", "b")
        assert (type(refused), closed) == (Refused, "closed")

    on_a_held_store(scenario, tick_s=3600.0)


def test_nobody_is_judged_by_a_silence_in_which_nobody_could_be_told_anything():
    """Groups beat once they are welcome, and a welcome waits behind the record that is being written."""

    async def scenario(store: HeldStore, desk: Desk) -> None:
        desk.come("job", "a")
        await asyncio.sleep(0.6)  # three times the timeout
        assert [type(message) for message in desk.heard("job", "a")] == [Welcome]
        assert list(desk.jobs.get("job").groups) == ["a"]  # pyright: ignore[reportOptionalMemberAccess]
        store.gate.set()
        await desk.hears("job", "a", NewQuorum)
        await desk.hears("job", "a", Evicted)  # now it is silent by itself

    on_a_held_store(scenario, tick_s=0.02, options={"heartbeat_timeout_s": 0.2})


def test_of_sessions_that_are_over_nothing_is_kept():
    async def scenario(store: HeldStore, desk: Desk) -> None:
        store.gate.set()
        desk.come("job", "a")
        desk.come("job", "b", total_shards=0)  # is refused
        await turns()
        desk.say("job", "a", Heartbeat())
        desk.jobs.evict("job", GroupName("a"), "an operator asks")
        await turns()
        for name in ("a", "b"):
            desk.close("job", name)
        desk.jobs.stand_down()
        desk.come("job", "c")  # comes too late, and is not served
        assert not desk.jobs._heard_s

    on_a_held_store(scenario, tick_s=3600.0)

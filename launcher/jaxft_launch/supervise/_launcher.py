"""The loop of a launch: supervises all groups and the coordinator until every group has ended."""

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxft_launch.processes._coordinator import START_TIMEOUT_S, Coordinator
from jaxft_launch.processes._processes import Child, Processes
from jaxft_launch.processes._ranks import Member
from jaxft_launch.processes._statuses import AGAIN, DONE, ERROR
from jaxft_launch.supervise._deadlines import END, Sign
from jaxft_launch.supervise._journal import CoordinatorEnded, CoordinatorStarted, DrainBegan, Journal
from jaxft_launch.supervise._ladder import Ladder
from jaxft_launch.supervise._life import RankProcess
from jaxft_launch.supervise._output import LogTail, Output, Row
from jaxft_launch.supervise._probe import Probe
from jaxft_launch.supervise._restarts import FIRST_WAIT_S, STEADY_S, doubled_s
from jaxft_launch.supervise._supervisor import Rules, State, Supervisor

POLL_S = 0.02


class Launcher:
    """Supervises the groups of one launch."""

    def __init__(
        self,
        members: Sequence[Member],
        command: Sequence[str],
        processes: Processes,
        rules: Rules,
        *,
        coordinator: Coordinator | None,
        silence_s: float = math.inf,
        journal: Journal,
        output: Output,
        phases: Path,
        probe: Probe | None = None,
        ladder_of: Callable[[Member], Ladder | None] = lambda member: None,
    ) -> None:
        """Prepare it.

        Args:
            members: the groups.
            command: the program.
            processes: what starts it.
            rules: when to end and restart a group.
            coordinator: the one of this launch, if it has one.
            silence_s: for how long it may give no sign of life.
            journal: gets the events.
            output: gets what people should read.
            phases: a folder on this machine.
            probe: says which devices work, if groups have ladders.
            ladder_of: returns the ladder of a group.
        """
        self._rules = rules
        self._coordinator: CoordinatorKeeper | None = None
        if coordinator is not None:
            self._coordinator = CoordinatorKeeper(coordinator, journal, output, silence_s=silence_s)
        self._journal = journal
        self._output = output
        self._drain_timeout_s = rules.drain_timeout_s
        self._kill_at_s: float | None = None
        self._drains = False
        self._interrupted = False
        self._tails: dict[Child, LogTail] = {}
        self.supervisors = [
            Supervisor(
                member,
                command,
                processes,
                rules,
                phases=phases,
                write=journal.write,
                say=output.say,
                ladder=ladder_of(member),
                probe=probe,
            )
            for member in members
        ]
        self._probe = probe

    @property
    def all_drained(self) -> bool:
        """Whether each group was drained by itself, and the job goes on without them."""
        return all(one.drained for one in self.supervisors)

    def run(self, signals: Sequence[int]) -> int:
        """Return the exit status of the launch. A number in `signals`, which may grow, drains or ends it."""
        try:
            return self._run(signals)
        finally:
            if self._probe is not None:
                self._probe.end()

    def _run(self, signals: Sequence[int]) -> int:
        seen = 0
        while not all(one.over for one in self.supervisors):
            for number in signals[seen:]:
                seen += 1
                self._take(number)
            for one in self.supervisors:
                one.poll()
            if self._coordinator is not None:
                self._coordinator.poll()
            self._end_together()
            self._give_up_stranded()
            if self._kill_at_s is None:  # otherwise all groups end anyway
                self._climb()
            self._pass_on()
            self._output.show(lambda: [row_of(one) for one in self.supervisors])
            time.sleep(POLL_S)
        self._pass_on()
        return self._status()

    def _climb(self) -> None:
        """Let groups climb their ladders, one at a time, while another group holds the job's state."""
        if self._probe is None:
            return
        self._probe.poll()
        for one in self.supervisors:
            if self._others_hold_the_state(one):
                one.climb()

    def _take(self, number: int) -> None:
        """Drain at the first signal, and end everything at the second."""
        name = signal.Signals(number).name
        if self._drains and number == signal.SIGHUP:
            return  # its terminal is closed, which may come as two signals, or after Ctrl-C
        if self._drains:
            self._output.say(f"got {name} again: ends all groups")
            self._kill_at_s = time.monotonic()
            return
        self._drains = True
        self._interrupted = number == signal.SIGINT
        self._kill_at_s = time.monotonic() + self._drain_timeout_s
        self._output.say(
            f"got {name}: each group finishes its step and leaves, within {self._drain_timeout_s:g} s. If no other "
            "group of the job is left, the job goes on from its newest checkpoint when it is started again. Without "
            "checkpoints, begin another run in another --folder, or under another job name"
        )
        self._journal.write(DrainBegan(signal=name))
        for one in self.supervisors:
            one.drain()

    def _end_together(self) -> None:
        """Once a group is done, the job is: the others are not restarted, and have a deadline.

        Not by one that came too late: the others may be in the second phase of their program, with another job.
        """
        if self._kill_at_s is None and any(
            one.state is State.DONE and not one.late for one in self.supervisors
        ):
            self._kill_at_s = time.monotonic() + self._rules.deadlines[END]
            for one in self.supervisors:
                one.leave()
        if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
            late = [one for one in self.supervisors if one.state is State.RUNNING]
            for one in late:
                self._output.say(f"{one.member.name} did not end in time: it is killed")
                one.kill()
            self._kill_at_s = math.inf

    def _give_up_stranded(self) -> None:
        """Give up a job whose state nothing holds: each of its groups has found that several times in a row.

        Only a launch that has started the coordinator knows all groups.
        """
        left = [one for one in self.supervisors if not one.over]
        if self._coordinator is None or self._drains or not all(one.stranded for one in left):
            return
        for one in left:
            one.give_up(
                "No group holds the job's state any more, and none has brought a checkpoint of it: it cannot go on. "
                "To train again from the first step, start another launch, in another --folder if you gave one. With "
                "checkpoints= in its Manager, it would go on from the newest one."
            )

    def _others_hold_the_state(self, one: Supervisor) -> bool:
        """Whether another group took part in its last step, or one of this launch has done or followed a step."""
        if one.running_life is not None and one.life is not None and one.life.members > 1:
            return True
        others = [other for other in self.supervisors if other is not one and other.running_life is not None]
        return any(other.life is not None and other.life.step > 0 for other in others)

    def _pass_on(self) -> None:
        """Pass on the new lines of all programs."""
        for one in self.supervisors:
            for rank in () if one.life is None else one.life.ranks:
                tail = self._tails.setdefault(rank.child, LogTail(rank.child.log, rank.child.log_start_bytes))
                # What it has started may still write, such as a program in a shell.
                for line in tail.lines(last=one.state is not State.RUNNING):
                    self._output.pass_on(_name_of(one, rank), line)

    def _status(self) -> int:
        done = [one for one in self.supervisors if one.state is State.DONE]
        # Only a launch that has started the coordinator knows all groups.
        if self._coordinator is not None and done and all(one.came_back_late for one in done):
            self._output.say(
                "no program has ended well: each group ended unexpectedly, and when it came back, the job was "
                "finished and its state gone. What the program does after that job, such as a second one, may not be "
                "done. Give each Manager checkpoints=: a restarted group then passes through a finished job"
            )
            return ERROR
        if done:
            return DONE
        if self._interrupted:
            return 128 + signal.SIGINT
        if self.all_drained:
            return DONE
        given_up = [one.status for one in self.supervisors if one.state is State.GIVEN_UP]
        return next((status for status in given_up if status != AGAIN), AGAIN)


class CoordinatorKeeper:
    """Restarts a coordinator that has ended: after a wait that doubles, unless it has lived for long.

    One that is silent for `silence_s` (it is stopped, or hangs) is killed for that: it keeps its port and its store
    from the next one. It is silent once it gives no further sign of life. A second start that hangs is ended, too.
    """

    def __init__(
        self, coordinator: Coordinator, journal: Journal, output: Output, *, silence_s: float = math.inf
    ) -> None:
        self._coordinator = coordinator
        self._journal = journal
        self._output = output
        self._silence_s = silence_s
        self._killed: Child | None = None
        self._listens = True
        self._start_s = 0.0
        self._sign: int | None = None
        self._sign_s = 0.0
        self._ended = 0
        self._due_s: float | None = None
        self._began_s = time.monotonic()
        self._told()

    def poll(self) -> None:
        """Restart it when that is due. It remembers the job's decisions."""
        child = self._coordinator.child
        status = child.exit_code()
        now_s = time.monotonic()
        if status is None:
            if self._killed is not child and (why := self._hangs(now_s)):
                self._killed = child
                self._output.say(f"the coordinator (pid {child.pid}) {why}: it is killed")
                child.kill()
            return
        if self._due_s is None:
            if time.monotonic() - self._began_s >= STEADY_S:
                self._ended = 0
            wait_s = doubled_s(FIRST_WAIT_S, self._ended)
            self._ended += 1
            self._due_s = time.monotonic() + wait_s
            self._output.say(
                f"the coordinator (pid {child.pid}) ended with exit status {status}; restarted in {wait_s:.0f} s\n"
                f"{child.log_tail()}"
            )
            self._journal.write(CoordinatorEnded(pid=child.pid, status=status, wait_s=wait_s))
        elif time.monotonic() >= self._due_s:
            self._start_again()

    def _hangs(self, now_s: float) -> str:
        """Return what it does not do; "" if it is as it should be."""
        if not self._listens:
            try:
                self._listens = self._coordinator.has_listened()
            except OSError:  # its log cannot be read now, and may say so
                self._start_s = now_s
            if not self._listens and now_s - self._start_s > START_TIMEOUT_S:
                return f"does not listen after {START_TIMEOUT_S:.0f} s"
        sign = self._coordinator.sign()
        if sign is None or sign != self._sign:
            self._sign, self._sign_s = sign, now_s
        if (silent_s := now_s - self._sign_s) > self._silence_s:
            return f"has been silent for {silent_s:.0f} s (a third of --deadlines silence=..., 5 s at least)"
        return ""

    def _start_again(self) -> None:
        try:
            self._coordinator.start_again()
        except (OSError, RuntimeError) as error:
            # No descriptor, process or disk is free. The groups wait for it.
            self._due_s = time.monotonic() + doubled_s(FIRST_WAIT_S, self._ended)
            self._ended += 1
            self._output.say(f"the coordinator cannot be started: {error}")
            return
        self._due_s = None
        self._began_s = time.monotonic()
        self._listens, self._start_s = False, time.monotonic()
        self._told()

    def _told(self) -> None:
        one = self._coordinator
        self._output.say(f"coordinator at {one.address} (pid {one.child.pid})")
        self._journal.write(CoordinatorStarted(pid=one.child.pid, address=one.address))


def row_of(one: Supervisor) -> Row:
    """Return a group's line of the table."""
    ranks = () if one.life is None or one.state is not State.RUNNING else one.life.ranks
    return Row(
        group=one.member.name,
        state=one.state,
        pids=tuple(rank.child.pid for rank in ranks),
        starts=one.lives,
        phase=_phase_of(ranks),
        step=one.step,
        phase_s=_phase_s(ranks),
    )


def _phase_of(ranks: Sequence[RankProcess]) -> str:
    return " ".join(dict.fromkeys(sign.phase for sign in _signs(ranks)))


def _phase_s(ranks: Sequence[RankProcess]) -> float | None:
    return max((time.time() - sign.since_t_s for sign in _signs(ranks)), default=None)


def _signs(ranks: Sequence[RankProcess]) -> Iterator[Sign]:
    return (sign for rank in ranks if (sign := rank.sign()) is not None)


def _name_of(one: Supervisor, rank: RankProcess) -> str:
    return one.member.name if one.member.world == 1 else f"{one.member.name}/{rank.rank}"

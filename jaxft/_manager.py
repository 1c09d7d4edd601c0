"""`Manager`: a group's membership of a job."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from jaxft_protocol.messages import NewQuorum

from jaxft._base._ending import keep_status
from jaxft._checkpoints import Checkpoints
from jaxft._checkpoints._manifest import check_changed
from jaxft._errors import ConfigurationError
from jaxft._heal._store import StateStore
from jaxft._programs._statics import StaticLeaves
from jaxft._ranks._ranks import compare
from jaxft._replica._config import GroupConfig
from jaxft._replica._draining import SigtermDrains
from jaxft._replica._engine import Engine
from jaxft._replica._leaving import Leaving
from jaxft._replica._membership import Membership, assemble
from jaxft._replica._runner import Runner
from jaxft._replica._steps import steps
from jaxft._report import StepReport
from jaxft._session._mailbox import Mailbox
from jaxft._session._network import Network
from jaxft._session._samples import check_shown
from jaxft._supervised._beacon import Beacon, beacon_of_process
from jaxft._telemetry._call import Observer, Observers

if TYPE_CHECKING:
    from jaxft._supervised._agent import Agent


class Manager:
    """This process's membership of a training job, as a replica group.

    A context manager. Entering it dials the coordinator; the group takes part from the first call of the step
    on, once its programs are compiled. Leaving the `with` block normally means that training came to its end
    here: the group leaves the quorum, and stays a donor until joiners that are on their way have fetched the
    state. Leaving it by an exception (or by SystemExit, as on preemption) leaves the job to the others.

    While it runs:

    * A lost peer is not an error. The remaining groups repeat the step; `report` counts the attempts.
    * Between two calls of the step this group may take any time. The others wait for a while, then go on without it,
      and its next call brings it back: docs/guarantees.md has the rule.
    * A lost coordinator is waited for, up to `failure_timeout_s`; computed work is kept.
    * If this group itself was thought dead, it comes back by itself: it heals from its peers.
    * On SIGTERM, if the program has no handler for it, or if an operator drains it, this group finishes its step and
      leaves the job at the boundary, without a loss. On SIGTERM in a round of `jaxft.diloco` it leaves after the
      current inner step. Its next call of the step raises `SystemExit(0)`, with which the process ends:
      docs/operate.md.

    Args:
        coordinator: `host:port` of the coordinator; if several stand by for each other, all of them, separated by
            commas. By default the environment variable JAXFT_COORDINATOR.
        group: this group's name: unique within the job, and the same after a restart. By default the
            environment variable JAXFT_GROUP.
        job: the training run's name. A coordinator serves many jobs.
        step: the number of committed steps behind the state that the first call of the step will pass; more
            than 0 after a restore from a checkpoint of your own.
        history: what `history` was when that checkpoint was saved; 0 for a fresh state. Without it, the state is not
            known to be of this job, and a job of which all groups have died does not go on from it.
        failure_timeout_s: how long any one failure may take before this group gives up: no answer from the
            coordinator, no group that holds the job's state, a peer that has computed and neither moves nor dies.
            How long a step takes plays no part. Every other timeout derives from it. More than a year is as a year.
        min_replicas: how many groups a step needs; by default the coordinator's setting when the job began. Equal in
            all groups that give it.
        settings: what else must be the same in all groups, and after every restart, by name: the fingerprint of a
            corpus, a seed, the learning rate. A group with other settings is refused, and the error names the
            difference; so is a checkpoint that was saved with other settings. At most 100 texts or numbers of 48 KiB
            in all.
        checkpoints: where, and every how many steps, the job's state is saved, by one group for all; for when all
            groups die at once. Call `restore` before the first step.
        spare: this group takes part only in the place of a lost group. Until then it follows: it holds the
            newest state, computes nothing, and each call of the step returns after one more step of the job. True if
            the environment variable JAXFT_SPARE is "1".
        other_meshes: groups may have different numbers of devices and other shardings. Read docs/meshes.md first:
            if a group's mesh changes bits of its contribution, the run's bits depend on who computed it; if it
            changes bits of the new state, groups would drift apart, which the digests notice. Equal in all groups.
            True if the environment variable JAXFT_OTHER_MESHES is "1".
        digest_every: every how many steps the groups compare fingerprints of their states, besides the first step
            of each quorum; by default so often that it costs less than 1 % of a step of 100 ms (see
            docs/guarantees.md). Equal in all groups.
        network: how this group is reached, and its proofs: its host and port, the job's token, certificates.
        events: file to which this group appends its events, one JSON object a line (docs/operate-api.md); "{group}"
            in its name is replaced by the group's. In a group of several processes, rank 0 writes it.

    Raises:
        ConfigurationError: for an argument that cannot be right; on entering, if the token, the certificates or
            `events` cannot be used.
        CoordinatorUnreachable: on entering, if the coordinator does not answer within `failure_timeout_s`.
        Diverged: from a step, if the groups' states differ without a majority.
        NonFinite: from a step, in all groups, if its means are not finite and the step is `nonfinite="raise"`.
        JoinRefused: on entering, if the coordinator asks for a token and this group has not the job's; from the
            first step, if this group's program or settings differ from the job's.

    Example:
        >>> import jaxft
        >>> manager = jaxft.Manager("localhost:29510", group="group-0", job="docs")
        >>> manager.step
        0
    """

    def __init__(  # noqa: PLR0913 (the settings of a group)
        self,
        coordinator: str | None = None,
        *,
        group: str | None = None,
        job: str = "default",
        step: int = 0,
        history: int = 0,
        failure_timeout_s: float = 60.0,
        min_replicas: int | None = None,
        settings: Mapping[str, str | float] | None = None,
        checkpoints: Checkpoints | None = None,
        spare: bool = False,
        other_meshes: bool = False,
        digest_every: int | None = None,
        network: Network | None = None,
        events: str | Path | None = None,
    ) -> None:
        network = Network() if network is None else network
        self._config = GroupConfig(
            coordinator=_given("coordinator", coordinator),
            group=_given("group", group),
            job=job,
            step=step,
            history=history,
            failure_timeout_s=failure_timeout_s,
            min_replicas=min_replicas,
            settings={} if settings is None else settings,
            checkpoints=checkpoints,
            spare=spare or os.environ.get("JAXFT_SPARE") == "1",
            other_meshes=other_meshes or os.environ.get("JAXFT_OTHER_MESHES") == "1",
            digest_every=digest_every,
            network=network.completed() if isinstance(network, Network) else network,
            events=events,
        )
        self._observers = Observers()
        self._member: Membership | None = None
        self._runner: Runner | None = None
        self._agent: Agent | None = None
        self._beacon: Beacon | None = None
        self._sigterm: SigtermDrains | None = None
        self._pid = 0  # of the process that has entered it

    @property
    def group(self) -> str:
        """This group's name."""
        return self._config.group

    @property
    def job(self) -> str:
        """The job's name."""
        return self._config.job

    @property
    def step(self) -> int:
        """The number of committed steps behind the state that this group holds."""
        if self._runner is None:
            return self._config.step
        self._runner.loop.read()
        return self._runner.step

    @property
    def history(self) -> int:
        """Which run the state of this group is of: a number of 64 bits, to be saved with checkpoints of your own.

        A job gets it when it begins, and keeps it as long as it continues from its own states. Known once
        `step.join`, or the first step, has returned; before, it is the passed `history`.
        """
        return self._config.history if self._runner is None else self._runner.history

    def steps(self, total: int | None) -> Iterator[int]:
        """Iterate over the steps of the job that are still to be done, up to `total` steps of the whole run.

        The loop follows the job: after a heal it continues at the job's step, and all groups end at the
        same state. A `for` loop over a range would count the calls of this group, and end elsewhere.

        Example:
            >>> import jax.numpy as jnp, jaxft
            >>> def train_step(w, batch):
            ...     return w - 0.1 * jaxft.pmean((batch @ w) @ batch), {}
            >>> batch_for = lambda step, shard: jnp.eye(3) * (step + shard)
            >>> step = jaxft.fault_tolerant(train_step, manager=None, shards=2)
            >>> state = step.join(jnp.ones(3), batch_for)
            >>> for number in step.steps(3):  # with a Manager: manager.steps(3)
            ...     state, metrics = step(state, batch_for)
            >>> number
            2

        Args:
            total: how many steps the run has, those before a restart included; the same in all groups. None: no end.

        Yields:
            The number of the next step, which is `manager.step`: 0 at first, and greater by one each time, unless
            this group was behind and has caught up.

        Raises:
            ConfigurationError: `step.join` was not called before, or the loop's body has not called the step,
                or has called it twice without having read `manager.step` in between.
        """
        return steps(self._engine, total)

    @property
    def quorum(self) -> NewQuorum | None:
        """The quorum in force, with `quorum_id`, the `members` in order and their shards; None outside one."""
        return None if self._member is None else self._member.session.quorum

    @property
    def participating(self) -> bool:
        """Whether this group is a member of the quorum in force."""
        quorum = self.quorum
        return quorum is not None and self._config.group in {member.group for member in quorum.members}

    @property
    def is_writer(self) -> bool:
        """Whether this group writes for the job: log lines, plots, evaluations, checkpoints of your own.

        True in at most one group for each step, in all of its processes, and the same in the whole time between two
        calls of the step, unless the job continues without this group meanwhile or the group loses the coordinator.
        It is the first group of the quorum that committed the step; the log names a new writer, and `report.writer`
        names it in every group. False before the first step.

        Example:
            >>> import jaxft
            >>> jaxft.Manager("localhost:29510", group="group-0").is_writer
            False
        """
        return self._runner is not None and self._runner.is_writer

    @property
    def report(self) -> StepReport:
        """The report of the last call of the step."""
        if self._runner is None:
            return StepReport(step=self._config.step)
        self._runner.loop.read()
        return self._runner.report

    def show(self, **values: float) -> None:
        """Show numbers of this training, such as its loss, on the coordinator's page and API, with the job.

        Sent about once a second, and only to a coordinator with an HTTP port; otherwise this does nothing. The job
        shows the numbers of a single member. It never waits. Converting a JAX array to float does, until the step has
        run: do that as often as your own log does.

        Example:
            >>> import jaxft
            >>> manager = jaxft.Manager("localhost:29510", group="group-0", job="docs")
            >>> manager.show(loss=2.31)

        Args:
            **values: at most 8 numbers, with names of at most 64 characters. Only finite ones are shown.

        Raises:
            ConfigurationError: there are too many values, a name is too long, or a value is not a number.
        """
        check_shown(values)
        if self._runner is not None:
            self._runner.show(values)

    def __enter__(self) -> Self:
        if self._member is not None:
            raise ConfigurationError("a Manager is entered once; make another for another run")
        self._pid = os.getpid()
        config = self._config
        self._beacon = beacon_of_process()
        if self._beacon is not None:
            self._beacon.joins(config.coordinator, config.group)
        store = StateStore()
        member = self._member = assemble(config, store)
        try:
            if os.environ.get("JAXFT_CHAOS"):
                from jaxft._supervised._agent import Agent

                self._agent = Agent.of_environment(coordinator=config.coordinator, group=config.group)
                self._agent.entered(member.listener.port)
            seen_by: list[Observer] = [each for each in (self._beacon, self._agent) if each is not None]
            if config.events is not None and not member.ranks.rank:
                from jaxft._telemetry._events import events_of

                events = events_of(member.identity, config.events, step=config.step, spare=config.spare)
                seen_by.append(events)
            self._observers = Observers(seen_by)
            member.start()
            # Before any collective, and before any rank waits for the others in a save or a restore.
            self._compare_ranks({"checkpoints": "none" if config.checkpoints is None else "some"})
        except BaseException as error:
            self._close(error)
            raise
        self._runner = Runner(config, member, store, self._observers)
        if self._beacon is not None:
            session = member.session if config.checkpoints is None else None
            self._beacon.stranded_while(lambda: isinstance(session, Mailbox) and session.stranded)
        self._sigterm = SigtermDrains(member.session.drain)
        return self

    def restore(
        self,
        state: Any,
        *,
        changed: Collection[str] = (),
        arrays: Callable[[Any], bool] | None = None,
    ) -> Any:
        """Return the state of the job's newest checkpoint, and set `step` to its step; or `state` itself.

        To be called before the first step. If groups that hold the job's state are there, no file is read: this
        group heals from them. If there is no checkpoint, training begins with `state`. After all groups have died,
        the job continues from the newest checkpoint that any of them brings; a fresh state never replaces it. In a
        group of several processes, all of them call this.

        Args:
            state: a state of the wanted structure, shapes, dtypes and shardings, such as the initial one. If a
                checkpoint is read, its arrays are consumed, as by a step: the devices need not hold two states. Or
                the types alone, as `jax.eval_shape(init, key)` returns them, with shardings where arrays are to be
                spread. They are returned if no checkpoint was read: `if state is shapes: state = init(key)`.
            changed: settings of this Manager that were changed on purpose since the checkpoint was saved, by name;
                "shards", if the step now has another number of them; "job", to go on from another job's. Anything
                else that differs is refused.
            arrays: as in `jaxft.fault_tolerant`, for a state that holds functions and settings too, such as
                `arrays=equinox.is_array`. The other leaves are not in the checkpoint and are returned as they are.

        Raises:
            ConfigurationError: the Manager has no `checkpoints` or is not entered, the first step has been taken,
                or the checkpoint is of another job, another model or other settings: the error names the difference.
                The number of shards is compared in the first step.
            CannotRestore: there are checkpoints, and all are damaged, or they cannot be read.
        """
        self._refuse_child("restore")
        check_changed(changed)
        if self._runner is None or self._runner.started:
            raise ConfigurationError("restore belongs inside `with Manager(...)` and before the first step")
        if self._config.checkpoints is None:
            raise ConfigurationError(
                "this Manager has no checkpoints: pass `checkpoints=jaxft.Checkpoints(folder)`"
            )
        statics = StaticLeaves(arrays)
        found = self._runner.restore(given := statics.without(state), changed)
        return state if found is given else statics.whole(found)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:
            return  # the group is in its job as long as the process that has entered it
        assert self._member is not None
        ends_with = error
        leaving = Leaving(self._config, self._member, self._runner, self._beacon, self._agent)
        try:
            leaving.leave(error)
        except BaseException as failure:
            ends_with = failure  # other ranks may be in a collective that waits for this one
            raise
        finally:
            leaving.finish_saves(ends_with)
            self._close(ends_with)

    def _compare_ranks(self, settings: Mapping[str, str]) -> None:
        """Refuse this rank if it differs from rank 0 in what decides which collectives it takes part in.

        Raises:
            ConfigurationError: it does.
        """
        if self._member is not None:
            compare(self._member.ranks, self._config.group, settings)

    @property
    def _engine(self) -> Engine:
        """What runs the steps of this group."""
        self._refuse_child("step")
        if self._runner is None:
            raise ConfigurationError(
                f"group {self.group!r} is not in its job: call the step inside `with jaxft.Manager(...) as "
                "manager:`"
            )
        return self._runner

    def _refuse_child(self, called: str) -> None:
        """Raise ConfigurationError in a child that the program has forked, which has no threads."""
        if self._pid in (0, os.getpid()):
            return
        raise ConfigurationError(
            f"Process {os.getpid()} has called the {called} of group {self.group!r}, but it was forked from process "
            f"{self._pid}, which is in the job. A fork has none of its threads and connections. Call the {called} in "
            f"process {self._pid} alone; a fork may do what needs no Manager and no JAX, such as loading data."
        )

    def _close(self, error: BaseException | None = None) -> None:
        text = "" if error is None else repr(error)
        if self._sigterm is not None:
            self._sigterm.close()
        if self._runner is not None:
            self._runner.close()
        if self._member is not None:
            if error is not None and self._member.ranks.size > 1:
                keep_status(error)
            self._member.close(text)
        self._observers.close(text)


def _given(name: str, value: str | None) -> str:
    """Return an argument, or its environment variable."""
    found = value if value is not None else os.environ.get(f"JAXFT_{name.upper()}")
    if found is None:
        raise ConfigurationError(
            f"jaxft.Manager needs a {name}: pass it, or set the environment variable JAXFT_{name.upper()}. "
            "`jaxft launch -- python my_train.py` sets both, and starts a coordinator."
        )
    return found

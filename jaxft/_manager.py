"""`Manager`: a group's membership of a job."""

import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Any, Self

from jaxft_protocol.messages import GroupName, Incarnation, NewQuorum
from jaxft_protocol.names import done_again
from jaxft_protocol.replica.state import Identity, LeaveNow

from jaxft._arrays._layout import Layout
from jaxft._chaos._agent import Agent
from jaxft._checkpoints import Checkpoints
from jaxft._checkpoints._settings import check_changed
from jaxft._errors import ConfigurationError, SessionFailed
from jaxft._heal._server import HealServer
from jaxft._heal._store import StateStore
from jaxft._programs._build import Programs
from jaxft._programs._nonfinite import Policy
from jaxft._replica._credentials import TLS, Credentials
from jaxft._replica._runner import Runner
from jaxft._replica._session import Session
from jaxft._report import StepReport
from jaxft._transport._listener import Listener

_log = logging.getLogger("jaxft")

MAX_NAME_LENGTH = 200
MAX_SETTING_LENGTH = 1000


class Manager:
    """This process's membership of a training job, as one of its replica groups.

    A context manager. Entering it dials the coordinator; the group takes part from the first call of the step
    on, once its programs are compiled. Leaving the `with` block normally means that training came to its end
    here: the group leaves the quorum, and stays a donor until joiners that are on their way have fetched the
    state. Leaving it by an exception (or by SystemExit, as on preemption) leaves the job to the others.

    While it runs:

    * A lost peer is not an error. The step is tried again with those who live; `report` says so.
    * Between two calls of the step this group may take any time. The others wait for a while, then go on without it,
      and its next call brings it back: docs/guarantees.md has the rule.
    * A lost coordinator is waited for, up to `failure_timeout_s`; what was computed is kept.
    * If this group itself was thought dead, it comes back by itself: it heals from its peers.

    Args:
        coordinator: `host:port` of the coordinator; of several that stand by for each other, all, with commas between
            them. By default that of the environment variable JAXFT_COORDINATOR.
        group: this group's lasting name, its own within the job; the same again after a restart. By default that of
            the environment variable JAXFT_GROUP.
        job: the training run's name. A coordinator serves many jobs.
        step: the number of committed steps behind the state that the first call of the step will pass; more
            than 0 after a restore from a checkpoint.
        failure_timeout_s: how long any one failure may take before this group gives up: no answer from the
            coordinator, nobody that holds the job's state, a peer that has computed and neither moves nor dies.
            How long a step takes plays no part. Every other timeout derives from it.
        min_replicas: how many groups a step needs; the coordinator's setting by default. Equal in all groups.
        settings: whatever else must be the same in all groups, and over all restarts, for this to be one run, by
            name: the fingerprint of a corpus, a seed, the learning rate. A group that differs is refused, with what
            differs; so is a checkpoint that was saved with others.
        checkpoints: where the job's state is saved every so many steps, by one group for all; for when all groups
            die at once. Call `restore` before the first step.
        spare: this group takes part only in the place of one that is lost. Until then it follows: it holds the
            newest state, computes nothing, and each call of the step returns after one more step of the job.
        other_meshes: groups may have different numbers of devices and other shardings. Read docs/meshes.md first:
            if a group's mesh changes bits of what it contributes, the run's bits depend on who computed what; if it
            changes bits of the new state, groups would drift apart, which the digests notice. Equal in all groups.
        digest_every: every how many steps the groups compare fingerprints of their states, beside the first step
            of each quorum; by default so often that it costs less than 1 % of a step of 100 ms (see
            docs/guarantees.md). Equal in all groups.
        host: the address at which the other groups reach this one; by default that of the environment variable
            JAXFT_HOST, or else the one from which this machine reaches the coordinator. As `host:port` where what
            they dial is forwarded to this process.

        token: the key of this job, as `jaxft-coordinator token` prints it, where the coordinator asks for one; by
            default that of the environment variable JAXFT_TOKEN. With a token, this group talks only to a coordinator
            and to groups that know it too. See docs/security.md.
        tls: certificates for the stream to the coordinator; None: it is not encrypted.

    Raises:
        ConfigurationError: for an argument that cannot be right; on entering, if `token` or `tls` cannot be used.
        CoordinatorUnreachable: on entering, if the coordinator does not answer within `failure_timeout_s`.
        Diverged: from a step, if the groups' states differ and no majority says which is right.
        NonFinite: from a step, in all groups, if its means are not finite and the step is `nonfinite="raise"`.
        JoinRefused: on entering, if the coordinator asks for a token and this group has not the job's; from the
            first step, if this group's program or settings differ from the job's.

    Example:
        >>> import jaxft
        >>> manager = jaxft.Manager("localhost:29510", group="group-0", job="docs")
        >>> manager.step
        0
    """

    def __init__(
        self,
        coordinator: str | None = None,
        *,
        group: str | None = None,
        job: str = "default",
        step: int = 0,
        failure_timeout_s: float = 60.0,
        min_replicas: int | None = None,
        settings: Mapping[str, str] | None = None,
        checkpoints: Checkpoints | None = None,
        spare: bool = False,
        other_meshes: bool = False,
        digest_every: int | None = None,
        host: str | None = None,
        token: str | None = None,
        tls: TLS | None = None,
    ) -> None:
        coordinator = _given("coordinator", coordinator)
        group = _given("group", group)
        _check_address(coordinator)
        _check_name("group", group)
        _check_name("job", job)
        if step < 0:
            raise ConfigurationError(f"step must be the number of committed steps, 0 or more, not {step}")
        if not failure_timeout_s > 0:
            raise ConfigurationError(
                f"failure_timeout_s must be more than 0 seconds, not {failure_timeout_s}"
            )
        if min_replicas is not None and min_replicas < 1:
            raise ConfigurationError(f"min_replicas must be at least 1, not {min_replicas}")
        if digest_every is not None and digest_every < 1:
            raise ConfigurationError(f"digest_every must be at least 1 step, not {digest_every}")
        self._coordinator = coordinator
        self._group = group
        self._job = job
        self._first_step = step
        self._failure_timeout_s = failure_timeout_s
        self._min_replicas = min_replicas
        self._settings = _checked(settings or {})
        self._checkpoints = checkpoints
        self._spare = spare
        self._other_meshes = other_meshes
        self._digest_every = digest_every
        self._host = host
        self._token = token
        self._tls = tls
        self._listener: Listener | None = None
        self._session: Session | None = None
        self._store: StateStore | None = None
        self._runner: Runner | None = None
        self._agent: Agent | None = None

    @property
    def group(self) -> str:
        """This group's name."""
        return self._group

    @property
    def job(self) -> str:
        """The job's name."""
        return self._job

    @property
    def step(self) -> int:
        """The number of committed steps behind the state that this group holds."""
        return self._first_step if self._runner is None else self._runner.step

    @property
    def quorum(self) -> NewQuorum | None:
        """The quorum in force, with `quorum_id`, the `members` in order and their shards; None outside one."""
        return None if self._session is None else self._session.quorum

    @property
    def participating(self) -> bool:
        """Whether this group is a member of the quorum in force."""
        quorum = self.quorum
        return quorum is not None and self._group in {member.group for member in quorum.members}

    @property
    def report(self) -> StepReport:
        """What the last call of the step did."""
        return StepReport(step=self._first_step) if self._runner is None else self._runner.report

    def __enter__(self) -> Self:
        if self._session is not None:
            raise ConfigurationError("a Manager is entered once; make another for another run")
        self._agent = Agent.of_environment(coordinator=self._coordinator, group=self._group)
        credentials = Credentials.read(self._token, self._tls)
        store = StateStore()
        incarnation = Incarnation(secrets.randbits(63))
        listener = Listener(
            job=self._job,
            group=self._group,
            incarnation=incarnation,
            on_heal=HealServer(store).serve,
            key=credentials.data_key,
        )
        host = self._host or os.environ.get("JAXFT_HOST") or _own_address(self._coordinator)
        identity = Identity(
            self._job,
            GroupName(self._group),
            incarnation,
            host if _has_port(host) else f"{host}:{listener.port}",
            self._coordinator,
        )
        _log.info(
            "[jaxft %s] listens on port %d; the others reach it at %s",
            *(self._group, listener.port, identity.address),
        )
        session = Session(identity, store, failure_timeout_s=self._failure_timeout_s, credentials=credentials)
        self._listener, self._store, self._session = listener, store, session
        if self._agent is not None:
            self._agent.entered(listener.port)
        try:
            session.start()
        except BaseException:
            self._close()
            raise
        self._runner = Runner(
            session,
            store,
            listener,
            identity,
            failure_timeout_s=self._failure_timeout_s,
            step=self._first_step,
            min_replicas=self._min_replicas,
            settings=self._settings,
            spare=self._spare,
            other_meshes=self._other_meshes,
            digest_every=self._digest_every,
            checkpoints=self._checkpoints,
        )
        return self

    def restore(self, state: Any, *, changed: Collection[str] = ()) -> Any:
        """Return the state of the job's newest checkpoint, and set `step` to its step; or `state` itself.

        To be called before the first step. If groups that hold the job's state are there, no file is read: this
        group heals from them. When all begin again at once, two read, and the others heal from these. If there is no
        checkpoint, training begins with `state`. After all groups have died, the job goes on from the newest
        checkpoint that any of them brings; a fresh state never replaces it.

        Args:
            state: a state of the wanted structure, shapes, dtypes and shardings, such as the initial one.
            changed: settings of this Manager that were changed on purpose since the checkpoint was saved, by name;
                "shards", if the step now has another number of them; "job", to go on from another job's. Anything
                else that differs is refused.

        Raises:
            ConfigurationError: the Manager has no `checkpoints` or is not entered, the first step has been taken,
                or the checkpoint is of another job, another model or other settings: what differs is said. The
                number of shards is compared in the first step.
            CannotRestore: there are checkpoints, and all are damaged.
        """
        check_changed(changed)
        if self._runner is None or self._session is None or self._runner.started:
            raise ConfigurationError("restore belongs inside `with Manager(...)` and before the first step")
        if self._checkpoints is None:
            raise ConfigurationError(
                "this Manager has no checkpoints: pass `checkpoints=jaxft.Checkpoints(folder)`"
            )
        frontier_step, held = self._session.frontier
        if held:
            _log.info("[jaxft %s] reads no checkpoint: it heals from the job's groups", self._group)
            return state
        # Only of a job that the coordinator remembers: else fresh states could found it before a restored one comes.
        if not frontier_step:
            return self._restored(state, changed, frontier_step)
        state, others_read = self._read(state, changed, frontier_step)
        if others_read:
            self._runner.heals_only(lambda like: self._read(like, changed, frontier_step))
        return state

    def _read(self, state: Any, changed: Collection[str], frontier_step: int | None) -> tuple[Any, bool]:
        """Read the newest checkpoint, unless others do so right now; return the state, and whether others do."""
        assert self._checkpoints is not None
        with self._checkpoints.reading(self._failure_timeout_s) as mine:
            if mine:
                return self._restored(state, changed, frontier_step), False
        _log.info("[jaxft %s] reads no checkpoint: others have, and it heals from them", self._group)
        return state, True

    def _restored(self, state: Any, changed: Collection[str], frontier_step: int | None) -> Any:
        assert self._checkpoints is not None
        assert self._runner is not None
        found = self._checkpoints.restore(state, job=self._job, settings=self._settings, changed=changed)
        if found is None:
            _log.info(
                "[jaxft %s] there is no checkpoint: begins with the state that it was given", self._group
            )
            return state
        behind = 0 if frontier_step is None else frontier_step - found.step
        again = f"; the job had committed {frontier_step}: {done_again(behind)}" if behind > 0 else ""
        _log.info("[jaxft %s] restored step %d from %s%s", self._group, found.step, found.folder, again)
        self._runner.restored(found, changed)
        return found.state

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        try:
            if kind is None and self._agent is not None:
                self._agent.finished()
            if kind is None and self._runner is not None and self._checkpoints is not None:
                self._checkpoints.finish(self._failure_timeout_s)
                self._runner.save_last()
            self._leave(self._session, finished=kind is None)
        finally:
            if self._checkpoints is not None:
                self._checkpoints.finish(self._failure_timeout_s)
            self._close()

    def _leave(self, session: Session, *, finished: bool) -> None:
        try:
            session.post(LeaveNow(finished))
            # After an exception there is no wait for joiners: they find other donors.
            patience_s = self._failure_timeout_s if finished else 1.0
            if self._runner is not None:
                self._runner.serve_until_left(patience_s)
        except SessionFailed as error:
            if finished:
                raise
            # The error that ended the `with` block goes on, and is most often this one.
            _log.warning("[jaxft %s] could not take its leave: %s", self._group, error)

    def _run(
        self,
        programs: Programs,
        layout: Layout,
        state: Any,
        batch: Any,
        shards: int | None,
        nonfinite: Policy,
    ) -> tuple[Any, Any]:
        if self._runner is None:
            raise ConfigurationError(
                f"group {self._group!r} is not in its job: call the step inside `with jaxft.Manager(...) as "
                "manager:`"
            )
        assert self._session is not None
        with self._session.in_step(True):
            state, metrics = self._runner.run(programs, layout, state, batch, shards, nonfinite)
        if self._agent is not None:
            self._agent.stepped(self._runner.report, state, shards)
        return state, metrics

    def _compiling(self) -> contextlib.AbstractContextManager[None]:
        """While this lasts the job does not take this group for one that hangs."""
        return contextlib.nullcontext() if self._session is None else self._session.in_step(False)

    def _close(self) -> None:
        if self._runner is not None:
            self._runner.close()
        if self._session is not None:
            self._session.close()
        if self._listener is not None:
            self._listener.close()


def _given(name: str, value: str | None) -> str:
    """Return an argument, or what the environment says in its place."""
    found = value if value is not None else os.environ.get(f"JAXFT_{name.upper()}")
    if found is None:
        raise ConfigurationError(
            f"jaxft.Manager needs a {name}: pass it, or set the environment variable JAXFT_{name.upper()}."
        )
    return found


def _check_address(coordinator: str) -> None:
    for address in coordinator.split(","):
        host, colon, port = address.strip().rpartition(":")
        if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
            raise ConfigurationError(
                f"the coordinator's address must be host:port, or several with commas between them, not "
                f"{coordinator!r}"
            )


def _has_port(host: str) -> bool:
    name, colon, port = host.rpartition(":")
    # An IPv6 address has colons of its own, but for those in brackets.
    return bool(colon) and port.isdigit() and (":" not in name or name.endswith("]"))


def _check_name(what: str, name: str) -> None:
    if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise ConfigurationError(
            f"{what} must be a name of 1 to {MAX_NAME_LENGTH} printable characters, not {name!r}"
        )


def _checked(settings: Mapping[str, str]) -> dict[str, str]:
    for name, value in settings.items():
        if not isinstance(value, str) or len(name) + len(value) > MAX_SETTING_LENGTH:  # pyright: ignore
            raise ConfigurationError(
                f"settings must be texts of at most {MAX_SETTING_LENGTH} characters, such as a digest, not "
                f"{name!r}: {value!r:.100}"
            )
    return {f"settings.{name}": value for name, value in settings.items()}


def _own_address(coordinator: str) -> str:
    """The address of the interface that leads to the coordinator: what the other groups can reach as well."""
    problems: list[str] = []
    for each in coordinator.split(","):
        try:
            address = _address_towards(each.strip())
        except OSError as error:
            problems.append(f"{each.strip()}: {error}")
            continue
        return f"[{address}]" if ":" in address else address
    raise ConfigurationError(
        f"cannot find the way to the coordinator ({'; '.join(problems)}). Is the host name right? Else pass `host=`, "
        "the address at which the other groups reach this one."
    )


def _address_towards(coordinator: str) -> str:
    host, _, port = coordinator.rpartition(":")
    family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing: it only picks the route
        return probe.getsockname()[0]

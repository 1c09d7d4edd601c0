"""How the processes of a group come together and join their job: rank 0 dials the coordinator, the others rank 0."""

import collections
import contextlib
import functools
import importlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxft_protocol.messages import GroupName, Incarnation
from jaxft_protocol.replica.state import Identity

from jaxft._base._ending import keep_status
from jaxft._base._room import once_there_is_room
from jaxft._errors import ConfigurationError
from jaxft._exchange import _compiled
from jaxft._exchange._reduce import check_floats
from jaxft._heal._server import HealServer
from jaxft._heal._store import StateStore
from jaxft._ranks._link import Life, Silence, came_from_xla, end_with
from jaxft._ranks._ranks import OneRank
from jaxft._replica._config import GroupConfig
from jaxft._replica._raised import report_by
from jaxft._session._credentials import Credentials
from jaxft._session._mailbox import Mailbox
from jaxft._session._session import Session
from jaxft._transport._addresses import leads_elsewhere
from jaxft._transport._endpoints import Endpoint
from jaxft._transport._listener import Connection, ConnectionRequest, Listener, dial
from jaxft._transport._sockets import split_address

if TYPE_CHECKING:
    from jaxft._ranks._follower import Follower
    from jaxft._ranks._leader import Leader

_log = logging.getLogger("jaxft")

# What makes the MACs of a job with a token.
_MACS = "cryptography.hazmat.primitives.ciphers.aead"
# Rank 0 sends the others its incarnation and its address in this many bytes: an address of IPv6 with the name of an
# interface, a port and a number of threads.
_CALL_BYTES = 200


@dataclass(frozen=True, slots=True)
class Membership:
    """This process's part in its group."""

    identity: Identity
    listener: Listener
    session: "Mailbox | Follower"
    ranks: "OneRank | Leader | Follower"
    dials: Session | None = None  # rank 0 alone

    def start(self) -> None:
        """Join the job: dial the coordinator, or wait for rank 0's first directive in the first step.

        Raises:
            JaxftError: the coordinator refused this group, or cannot be reached.
        """
        if self.dials is not None:
            self.dials.start()

    def close(self, error: str = "") -> None:
        self.ranks.close(error)
        self.session.close()
        self.listener.close()


def assemble(config: GroupConfig, store: StateStore) -> Membership:
    """Connect this process with the others of its group, if `jax.distributed` has made them one.

    Raises:
        ConfigurationError: NumPy flushes denormals, the token or TLS cannot be used, the ranks have different
            numbers of devices, or `jax.distributed` is not initialised in a rank of several.
        CoordinatorUnreachable: this machine has found no route to it within the failure timeout.
    """
    check_floats()
    rank, size = _rank_and_size(config.group)
    try:
        return _assemble(config, store, rank, size)
    except BaseException as error:
        if size > 1:
            keep_status(error)
        raise


def _assemble(config: GroupConfig, store: StateStore, rank: int, size: int) -> Membership:
    credentials = Credentials.read(config.network.token, config.network.tls)
    if credentials.key is not None:
        importlib.import_module(_MACS)  # now, not in the first exchange
    if size > 1:
        check_devices([device.process_index for device in jax.devices()])
    if rank:
        return _follow(config, store, credentials, rank, size)
    incarnation = Incarnation(secrets.randbits(63))
    listener = _listener(config, store, credentials, incarnation, rank)
    own = _own_endpoint(config, listener, rank)
    leader = None
    if size > 1:
        with _met_in_time(config):
            _announce(incarnation, own.address)
        leader = _lead(config, listener, size)
    ranks = leader or OneRank()
    others = leader.addresses(config.failure_timeout_s) if leader else ()
    address = ",".join([str(own), *others])
    identity = Identity(config.job, GroupName(config.group), incarnation, address, config.coordinator)
    session = Session(
        identity,
        store,
        failure_timeout_s=config.failure_timeout_s,
        credentials=credentials,
        ranks=ranks,
    )
    mailbox = session.mailbox
    if leader is not None:
        leader.on_progress = mailbox.got_on
        leader.on_drain = mailbox.drain
        leader.on_raised = functools.partial(report_by(mailbox), timeout_s=config.failure_timeout_s)
    return Membership(identity, listener, mailbox, ranks, session)


def silence_s(failure_timeout_s: float) -> float:
    """How long a rank may be silent before its group counts as lost."""
    return max(2.0, failure_timeout_s / 6)


def _rank_and_size(group: str) -> tuple[int, int]:
    if not jax.distributed.is_initialized():
        started = int(os.environ.get("JAXFT_NPROC", "1"))
        if started > 1 and os.environ.get("JAXFT_GROUP") == group:
            raise ConfigurationError(
                f"`jaxft launch` has started {started} processes as group {group!r}, but jax.distributed is not "
                "initialised in this one, so that each would join as the whole group. Call this before anything "
                'else of JAX: `jax.distributed.initialize(num_processes=int(os.environ["JAXFT_NPROC"]), '
                'process_id=int(os.environ["JAXFT_RANK"]))`. Or leave out --nproc: one process can use all devices.'
            )
        return 0, 1
    return jax.process_index(), jax.process_count()


def check_devices(ranks: Sequence[int]) -> None:
    """Check that each rank has as many devices as any other. `ranks` has each device's rank.

    Raises:
        ConfigurationError: rank 0 has another number of devices than another rank.
    """
    counts = collections.Counter(ranks)
    for rank, count in sorted(counts.items()):
        if count != counts[0]:
            raise ConfigurationError(
                f"Rank {rank} of this group has {count} devices, and its rank 0 has {counts[0]}: every rank must "
                "have as many as any other. Check which devices each process can see, such as with "
                "`--devices` of `jaxft launch` or JAX_LOCAL_DEVICE_IDS."
            )


def _listener(
    config: GroupConfig, store: StateStore, credentials: Credentials, incarnation: Incarnation, rank: int
) -> Listener:
    return Listener(
        ports=config.network.ports,
        job=config.job,
        group=config.group,
        incarnation=incarnation,
        on_heal=HealServer(store).serve,
        key=credentials.data_key,
        rank=rank,
    )


def _own_endpoint(config: GroupConfig, listener: Listener, rank: int) -> Endpoint:
    endpoint = config.network.endpoint(listener.port, config.coordinator, limit_s=config.failure_timeout_s)
    _log.info(
        "[jaxft %s] rank %d listens on port %d; the others reach it at %s",
        *(config.group, rank, listener.port, endpoint),
    )
    if not config.network.host and leads_elsewhere(split_address(endpoint.address)[0], config.coordinator):
        _log.warning(
            "[jaxft %s] announces %s, which is every machine's own address: the coordinator's name leads to this "
            "machine itself (%s). Unless all groups run here, pass `Network(host=...)` or set JAXFT_HOST, "
            "the address at which the other groups reach this one.",
            *(config.group, endpoint.address, config.coordinator),
        )
    return endpoint


def _lead(config: GroupConfig, listener: Listener, size: int) -> "Leader":
    from jaxft._ranks._leader import Leader

    deadline_s = time.monotonic() + config.failure_timeout_s
    connections: list[Connection] = []
    lives: list[Life] = []
    for rank in range(1, size):
        with _ends_without(rank, config):
            connections.append(listener.take_rank(rank, deadline_s=deadline_s))
            lives.append(_life(listener.take_rank(rank, 1, deadline_s=deadline_s)))
    leader = Leader(
        connections,
        lives=lives,
        silence_s=silence_s(config.failure_timeout_s),
        stuck_s=config.failure_timeout_s,
        name=config.group,
    )
    leader.start()
    return leader


def _follow(
    config: GroupConfig, store: StateStore, credentials: Credentials, rank: int, size: int
) -> Membership:
    from jaxft._ranks._follower import Follower, Place

    with _met_in_time(config):
        incarnation, leader_address = _hear_announcement()
    listener = _listener(config, store, credentials, incarnation, rank)
    own = _own_endpoint(config, listener, rank)
    group = config.group
    request = ConnectionRequest("rank", config.job, group, incarnation, group, incarnation, rank)
    deadline_s = time.monotonic() + config.failure_timeout_s
    with _ends_without(0, config):
        connection, second = (
            dial(leader_address, each, deadline_s=deadline_s, key=credentials.data_key)
            for each in (request, replace(request, lane=1))
        )
    follower = Follower(
        connection,
        Place(rank, size, str(own)),
        store,
        Silence(silence_s(config.failure_timeout_s), config.failure_timeout_s),
        life=_life(second),
        name=group,
    )
    identity = Identity(config.job, GroupName(group), incarnation, follower.address, config.coordinator)
    return Membership(identity, listener, follower, follower)


def _life(connection: Connection) -> Life:
    lane = _compiled.library()
    return Life(connection, None if lane is None else lane.live)


@contextlib.contextmanager
def _ends_without(rank: int, config: GroupConfig) -> Iterator[None]:
    """Within the context, end this process if it does not come together with another rank.

    That is no error of the program: the group has to be started again, as when a rank is lost later. An exception
    would have JAX wait for that rank when the interpreter ends.
    """
    try:
        yield
    except TimeoutError:
        end_with(
            config.group,
            f"rank {rank}",
            f"it has not connected with this rank for {config.failure_timeout_s:g} s",
        )
    except ConnectionError as error:
        end_with(config.group, f"rank {rank}", str(error))


@contextlib.contextmanager
def _met_in_time(config: GroupConfig) -> Iterator[None]:
    """Within the context, which is a collective of all ranks, end this process if another rank does not come to it.

    Some collectives give up by themselves, gloo after 30 s, and others wait forever.
    """
    late = f"it has not entered its Manager for {config.failure_timeout_s:g} s"

    def start() -> threading.Timer:
        timer = threading.Timer(config.failure_timeout_s, end_with, [config.group, "another rank", late])
        timer.daemon = True
        timer.start()
        return timer

    timer = once_there_is_room(start)
    try:
        yield
    except Exception as error:
        if not came_from_xla(error):
            raise
        end_with(config.group, "another rank", f"it has not entered its Manager, or has ended: {error}")
    finally:
        timer.cancel()


def _announce(incarnation: Incarnation, address: str) -> None:
    encoded = address.encode()
    call = np.zeros(_CALL_BYTES, np.uint8)
    message = incarnation.to_bytes(8, "big") + len(encoded).to_bytes(2, "big") + encoded
    call[: len(message)] = np.frombuffer(message, np.uint8)
    multihost_utils.broadcast_one_to_all(call)


def _hear_announcement() -> tuple[Incarnation, str]:
    heard = multihost_utils.broadcast_one_to_all(np.zeros(_CALL_BYTES, np.uint8))
    call = np.asarray(heard, np.uint8).tobytes()
    length = int.from_bytes(call[8:10], "big")
    return Incarnation(int.from_bytes(call[:8], "big")), call[10 : 10 + length].decode()

"""Connects the members of a quorum, each with each.

Of two members, the one that is first in the quorum's order dials. All dials run at once, and then connections from
earlier members are taken: one unresponsive member does not hide another, and is the only one blamed.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jaxft_protocol.credentials import DataKey

from jaxft._errors import ExchangeFailed
from jaxft._exchange._patience import Patience
from jaxft._transport._handshake import Dialling
from jaxft._transport._listener import Abort, Connection, ConnectionRequest, Listener
from jaxft._transport._sockets import Aborted, wait_any


@dataclass(frozen=True, slots=True)
class Peer:
    """A member of a quorum, or the one of its processes that holds what this one does.

    Args:
        group: its name.
        incarnation: its incarnation.
        address: of the process.
        shards: the member's shards of the step.
        rank: the process's number in its group.
    """

    group: str
    incarnation: int
    address: str
    shards: tuple[int, ...]
    rank: int = 0


def connect_mesh(
    listener: Listener,
    request: ConnectionRequest,
    *,
    me: int,
    members: Sequence[Peer],
    abort: Abort,
    patience: Patience,
) -> dict[int, Connection]:
    """Connect to every other member; return the connections by the members' numbers. Raises ExchangeFailed."""
    made: dict[int, Connection] = {}
    dialling: dict[int, Dialling] = {}
    try:
        for number in range(me + 1, len(members)):
            dialling[number] = _begin(members[number], request, listener.key)
        while dialling:
            for number in _advance(dialling, members, request, made, abort=abort, patience=patience):
                patience.moved()
                del dialling[number]
        _take_lower(made, listener, request, members[:me], abort=abort, patience=patience)
    except BaseException:
        for one in [*made.values(), *(unfinished.sock for unfinished in dialling.values())]:
            one.close()
        raise
    return made


def _begin(peer: Peer, request: ConnectionRequest, key: DataKey | None) -> Dialling:
    try:
        to_peer = replace(request, to_group=peer.group, to_incarnation=peer.incarnation, rank=peer.rank)
        return Dialling(peer.address, to_peer, key)
    except ConnectionError as error:
        raise _failed(request, str(error), [peer]) from error


def _advance(
    dialling: dict[int, Dialling],
    members: Sequence[Peer],
    request: ConnectionRequest,
    made: dict[int, Connection],
    *,
    abort: Abort,
    patience: Patience,
) -> list[int]:
    """Wait for any dial to progress; add those that were accepted to `made`, and return their numbers."""
    sources = {one.sock.fileno(): one.events for one in dialling.values()}
    waited_for = [members[number] for number in dialling]
    what = f"{_names(waited_for)} to accept a connection for quorum {request.number}"
    try:
        ready = patience.until(
            lambda deadline_s: wait_any(sources, deadline_s=deadline_s, what=what, abort=abort)
        )
    except TimeoutError as error:
        why = f"Timed out after {patience.still_s:.1f} s waiting for {what}."
        raise _failed(request, why, waited_for) from error
    except Aborted as error:
        raise _failed(request, str(error), []) from error
    accepted: list[int] = []
    failures: dict[int, ConnectionError] = {}
    for number, one in dialling.items():
        if one.sock.fileno() not in ready:
            continue
        try:
            if (connection := one.advance()) is not None:
                made[number] = connection
                accepted.append(number)
        except ConnectionError as error:
            failures[number] = error
    if failures:
        text = " ".join(map(str, failures.values()))
        raise _failed(request, text, [members[number] for number in failures])
    return accepted


def _take_lower(
    made: dict[int, Connection],
    listener: Listener,
    request: ConnectionRequest,
    lower: Sequence[Peer],
    *,
    abort: Abort,
    patience: Patience,
) -> None:
    late: list[Peer] = []
    for number, peer in enumerate(lower):
        take = functools.partial(
            listener.take,
            quorum_id=request.number,
            group=peer.group,
            incarnation=peer.incarnation,
            lane=request.lane,
            abort=abort,
        )
        try:
            made[number] = patience.until(lambda deadline_s, take=take: take(deadline_s=deadline_s))
            if not late:
                patience.moved()
        except TimeoutError:
            late.append(peer)  # later members may have connected already
        except ConnectionError as error:
            raise _failed(request, str(error), []) from error  # this group is leaving: no peer to blame
    if late:
        raise _failed(request, f"{_names(late)} did not connect to this group in time.", late)


def _failed(request: ConnectionRequest, why: str, peers: Sequence[Peer]) -> ExchangeFailed:
    return ExchangeFailed(
        f"Group {request.group!r} could not connect to all members of quorum {request.number}. {why}",
        tuple(peer.group for peer in peers),
    )


def _names(peers: Iterable[Peer]) -> str:
    return ", ".join(f"group {peer.group!r} at {peer.address}" for peer in peers)

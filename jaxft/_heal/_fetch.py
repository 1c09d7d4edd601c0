"""The joiner's end of healing: fetches state and means from all donors at once, and verifies each chunk.

Each donor has a connection and a thread. A donor that fails in any way (EOF, silence, a wrong digest, other leaves,
"gone") is dropped for the rest of the heal with a line in the log, and the others go on. One from which a damaged
chunk arrives is first dialled once more. The heal fails when no donor is left, or none that keeps some part of the
state. An unresponsive donor delays nothing while the others have all that is wanted.
"""

import functools
import logging
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxft_protocol.credentials import DataKey
from jaxft_protocol.messages import WHOLE
from jaxft_protocol.ranks.lanes import Span
from jaxft_protocol.values import SLOW_WAIT_S

from jaxft._arrays._layout import LeafSpec
from jaxft._arrays._leaf_types import LeafType
from jaxft._arrays._memory import aligned_empty
from jaxft._errors import HealFailed
from jaxft._heal._blob import ALIGN_BYTES, BlobLayout, bands_of
from jaxft._heal._frames import (
    MAX_TEXT_BYTES,
    BadFrame,
    Damaged,
    Kind,
    Manifest,
    Request,
    Status,
    read_manifest,
)
from jaxft._heal._stripes import Stripes, ask, header, text
from jaxft._transport._listener import Abort, Connection, ConnectionRequest, dial
from jaxft._transport._sockets import Aborted
from jaxft._transport._threads import Team

_log = logging.getLogger("jaxft")

# A donor's manifest is read up to this many bytes beyond twice the size of ours, to report what differs in it.
_MORE_MANIFEST_BYTES = 1 << 20
# A donor's message is quoted up to this length.
_MAX_QUOTE = 500
# 28 bytes on an idle connection: they take longer than this only if the donor is stopped.
_NOTICE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class DonorAt:
    """A process that holds the state: its group's name and incarnation, the address of its data plane, its rank."""

    group: str
    incarnation: int
    address: str
    rank: int = 0


class _Donor:
    def __init__(self, at: DonorAt, request: ConnectionRequest) -> None:
        self.name = at.group
        self.address = at.address
        self.request = replace(request, to_group=at.group, to_incarnation=at.incarnation, rank=at.rank)
        self.connection: Connection | None = None
        self.answers = False  # its manifest has come
        self.redialled = ""  # why, since the last fetch that succeeded
        self.failed = ""
        self._told = False  # that it takes long

    @property
    def trouble(self) -> str:
        """The known faults of the donor."""
        if self.failed or not self.redialled:
            return self.failed or ("" if self.answers else "no answer yet")
        return f"dialled once more, since {self.redialled}"

    def fail(self, error: Exception) -> None:
        self.failed = (str(error) or type(error).__name__)[:_MAX_QUOTE]
        self.close()
        _log.warning("Dropped donor %s: %s", self.name, self.failed)

    def redial(self, error: Exception) -> None:
        """Go on over a new connection. Only once in a fetch: a second time it is not the network."""
        self.redialled = str(error)
        self.close()
        _log.warning("Dials donor %s once more: %s", self.name, error)

    def not_ready(self, since_s: float, answer: str) -> None:
        """The donor does not have the requested state or means yet. Log a long wait once."""
        waited_s = time.monotonic() - since_s
        if waited_s < SLOW_WAIT_S:
            self._told = False
        elif not self._told:
            self._told = True
            _log.info("Still waiting for donor %s to be ready after %.0f s: %s", self.name, waited_s, answer)

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


class Fetcher:
    """Fetches the state and the means for one heal. Not thread-safe."""

    def __init__(  # noqa: PLR0913 (by name: a heal, and who takes part)
        self,
        *,
        job: str,
        group: str,
        incarnation: int,
        heal_id: int,
        donors: Sequence[DonorAt],
        timeout_s: float,
        key: DataKey | None = None,
        span: Span | None = None,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self.transferred_bytes = 0
        self._moved = moved
        self._span = span
        self._heal_id = heal_id
        self._timeout_s = timeout_s
        self._key = key
        request = ConnectionRequest("heal", job, group, incarnation, "", 0, heal_id)
        self._donors = [_Donor(donor, request) for donor in donors]

    def state(
        self, step: int, types: Sequence[LeafType], bands: Sequence[int] | None = None, *, cancel: Abort
    ) -> list[np.ndarray]:
        """Fetch the pinned state `step`, whose leaves have these types and lie in these bands.

        Without `bands`, `types` describe the whole state.

        Raises:
            HealFailed: no donor is left that keeps all or some of it, the donors hold other leaves, or `cancel` was
                set.
        """
        layout = BlobLayout.of(types, bands_of(types) if bands is None else bands)
        # Not from the pool: a block of this size would be kept for the next contribution of this size.
        arena = _aligned(layout.total_bytes)
        self._fetch(self._request(Kind.STATE, step), layout, arena, cancel, list(types))
        self._say_held(step)
        return layout.arrays(arena)

    def means(self, step: int, specs: Sequence[LeafSpec], *, cancel: Abort) -> list[np.ndarray]:
        """Fetch the means of a step that is committed, waiting for a donor to reach it.

        Raises:
            HealFailed: no donor is left, or `cancel` was set.
        """
        layout = BlobLayout.of([LeafType(spec.shape, spec.result_dtype) for spec in specs])
        arena = aligned_empty(layout.total_bytes)
        self._fetch(self._request(Kind.MEANS, step), layout, arena, cancel)
        return layout.arrays(arena)

    def edits(self, step: int, types: Sequence[LeafType], *, cancel: Abort) -> list[np.ndarray]:
        """Fetch the leaves, of these types, that were edited before a committed step.

        Raises:
            HealFailed: no donor is left, or `cancel` was set.
        """
        layout = BlobLayout.of(types)
        arena = _aligned(layout.total_bytes)
        if layout.total_bytes:
            self._fetch(self._request(Kind.EDITS, step), layout, arena, cancel)
        return layout.arrays(arena)

    def _request(self, kind: Kind, step: int) -> Request:
        return Request(kind, self._heal_id, step, span=self._span)

    def close(self) -> None:
        for donor in self._donors:
            donor.close()

    def _say_held(self, step: int) -> None:
        """Tell the donors which state this group holds, so that they can free what came before."""
        for donor in self._donors:
            if donor.connection is None:
                continue
            try:
                deadline_s = time.monotonic() + _NOTICE_TIMEOUT_S
                ask(donor.connection, self._request(Kind.HOLDS, step), deadline_s, None)
            except (ConnectionError, TimeoutError):
                donor.close()  # the next fetch dials it again

    # ---- donors ----

    def _fetch(
        self,
        request: Request,
        layout: BlobLayout,
        arena: np.ndarray,
        cancel: Abort,
        types: list[LeafType] | None = None,
    ) -> None:
        usable = [donor for donor in self._donors if not donor.failed]
        stripes = Stripes(
            request, layout, arena, timeout_s=self._timeout_s, donors=len(usable), moved=self._moved
        )
        team = Team()
        try:
            for donor in usable:
                serve = functools.partial(self._serve, donor, request, stripes, types)
                team.start(f"jaxft-heal-{donor.name}", serve)
            if usable:
                stripes.wait(cancel)
            team.wait()
        except BaseException as error:  # such as Ctrl-C, or no room for another thread
            stripes.end(f"this group ends it: {error!r}")
            team.end()  # or they would use connections that the caller closes
            raise
        if cancel.is_set:
            raise HealFailed(f"the heal was superseded: {cancel.reason}")
        if not stripes.complete:
            raise HealFailed(self._why_none_is_left(stripes.lost))
        for donor in self._donors:
            donor.redialled = ""
        self.transferred_bytes += layout.total_bytes

    def _why_none_is_left(self, lost: str) -> str:
        reasons = "; ".join(f"{donor.name}: {donor.trouble}" for donor in self._donors if donor.trouble)
        if lost:
            return f"no donor is left that keeps {lost} ({reasons or 'none has failed in this heal'})"
        return f"no donor is left ({reasons or 'the coordinator named none'})"

    def _serve(self, donor: _Donor, request: Request, stripes: Stripes, types: list[LeafType] | None) -> None:
        try:
            try:
                self._serve_once(donor, request, stripes, types)
            except Damaged as error:
                if donor.redialled:
                    raise
                donor.redial(error)
                self._serve_once(donor, request, stripes, types)
        except Aborted:
            donor.close()  # stopped in the middle of a transfer; may be dialled again
        except Exception as error:  # a failing donor must not end the others
            donor.fail(error)
        finally:
            stripes.leave()

    def _serve_once(
        self, donor: _Donor, request: Request, stripes: Stripes, types: list[LeafType] | None
    ) -> None:
        connection = self._connection(donor, stripes.over)
        if types is not None:
            manifest = self._check_manifest(donor, connection, request, types, stripes.over)
            donor.answers = True
            stripes.serve(connection, manifest.stripe, live=manifest.live)
        else:
            held = self._request(Kind.HOLDS, request.step)
            ask(connection, held, time.monotonic() + self._timeout_s, stripes.over)
            # A donor that is behind the others takes no chunk from them.
            self._answer(donor, connection, request, MAX_TEXT_BYTES, stripes.over)
            stripes.serve(connection)

    def _connection(self, donor: _Donor, abort: Abort) -> Connection:
        if donor.connection is not None and _is_readable(donor.connection):
            donor.close()  # nothing was requested, so readable means closed
        if donor.connection is None:
            deadline_s = time.monotonic() + self._timeout_s
            donor.connection = dial(
                donor.address, donor.request, deadline_s=deadline_s, abort=abort, key=self._key
            )
        return donor.connection

    def _check_manifest(
        self, donor: _Donor, connection: Connection, request: Request, types: list[LeafType], abort: Abort
    ) -> Manifest:
        ours = Manifest(request.step, types, WHOLE, live=True)
        limit_bytes = 2 * len(ours.encode()) + _MORE_MANIFEST_BYTES
        asked = self._request(Kind.MANIFEST, request.step)
        found = read_manifest(self._answer(donor, connection, asked, limit_bytes, abort))
        if found.step != request.step:
            raise BadFrame(f"it keeps state {found.step}, not state {request.step}")
        if found.leaves != types:
            raise BadFrame(f"the leaves of its state differ: {_first_difference(found.leaves, types)}")
        return found

    def _answer(
        self, donor: _Donor, connection: Connection, request: Request, limit_bytes: int, abort: Abort
    ) -> str:
        """Wait until a donor has the requested state or means; return the text of its answer."""
        began_s = time.monotonic()
        while True:
            deadline_s = time.monotonic() + self._timeout_s
            ask(connection, request, deadline_s, abort)
            reply = header(connection, deadline_s, abort)
            answer = text(connection, reply, limit_bytes, deadline_s, abort)
            if reply.status is Status.OK:
                return answer
            if reply.status is not Status.NOT_YET:
                raise BadFrame(answer)
            if time.monotonic() >= began_s + self._timeout_s:
                raise TimeoutError(f"it was not ready for {self._timeout_s:g} s: {answer}")
            donor.not_ready(began_s, answer)


def _first_difference(theirs: list[LeafType], ours: list[LeafType]) -> str:
    if len(theirs) != len(ours):
        return f"it has {len(theirs)} leaves, here are {len(ours)}"
    index = next(i for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b)
    return f"leaf {index} is {theirs[index]} there, and {ours[index]} here"


def _is_readable(connection: Connection) -> bool:
    poller = select.poll()
    poller.register(connection.sock, select.POLLIN)
    return bool(poller.poll(0))


def _aligned(size_bytes: int) -> np.ndarray:
    """Fresh memory that is returned to the system when freed; numpy requests huge pages for it."""
    raw = np.empty(size_bytes + ALIGN_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGN_BYTES
    return raw[start : start + size_bytes]

"""A man in the middle who relays the handshake of two honest ends, and then speaks itself.

It knows no token. It has taken the address of a group that is gone, or sits on the path.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from jaxft_protocol import credentials
from jaxft_protocol.credentials import DataKey, JobKey
from jaxft_protocol.messages import WHOLE

from jaxft._arrays._layout import Layout, LeafSpec
from jaxft._arrays._leaf_types import type_of
from jaxft._errors import ExchangeFailed, HealFailed
from jaxft._exchange import _compiled, _grid_links
from jaxft._exchange._links import Links, Peer
from jaxft._exchange._patience import Patience
from jaxft._heal._blob import BlobLayout
from jaxft._heal._fetch import DonorAt, Fetcher
from jaxft._heal._frames import REQUEST_BYTES, Kind, Manifest, Reply, Request, Status
from jaxft._heal._server import HealServer
from jaxft._heal._store import StateStore
from jaxft._transport._listener import Abort, Connection, Listener
from jaxft._transport._seals import Checksums, Macs, Tags
from tests import patience
from tests.exchange.members import partials_of, reference_means, run_exchange
from tests.heal.donors import same_bits, values

KEY = credentials.data_key(JobKey(b"k" * 32))
PATIENCE_S = patience.FAR_S
HEAL, QUORUM, STEP = 5, 5, 3

Then = Callable[[socket.socket, socket.socket], None]


@contextmanager
def man_in_the_middle(honest_port: int, then: Then) -> Iterator[str]:
    """An address with the handshake of an honest group, after which `then` takes over; as often as dialled."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):  # the server is shut down
                while True:
                    meet(server.accept()[0])

        def meet(victim: socket.socket) -> None:
            with contextlib.suppress(Exception), victim:  # the victim has the error
                victim.settimeout(PATIENCE_S)
                with socket.create_connection(("127.0.0.1", honest_port), timeout=PATIENCE_S) as honest:
                    for source, target in ((victim, honest), (honest, victim)) * 2:
                        target.sendall(source.recv(1000))
                    then(victim, honest)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            patience.join(thread)


@contextmanager
def listening(group: str, incarnation: int, **options: object) -> Iterator[Listener]:
    made = Listener(
        host="127.0.0.1",
        job="job",
        group=group,
        incarnation=incarnation,
        **{"on_heal": None, "key": KEY, **options},  # pyright: ignore[reportArgumentType]
    )
    try:
        yield made
    finally:
        made.close()


def relayed_bytes(source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 16):
            target.sendall(change(piece))
        target.shutdown(socket.SHUT_WR)


def relay(victim: socket.socket, honest: socket.socket, change: Callable[[bytes], bytes]) -> None:
    """Carry all messages, and change those to the victim."""
    back = threading.Thread(target=relayed_bytes, args=(victim, honest, bytes))
    back.start()
    relayed_bytes(honest, victim, change)
    back.join()


# ---- healing ----

TRUE, FORGED = [values((1000,), seed=1)], [values((1000,), seed=2)]


def forge_state(victim: socket.socket, tags: Tags) -> None:
    """Serve another state than the donor's."""
    size_bytes = REQUEST_BYTES + tags.size_bytes
    while len(received := victim.recv(size_bytes)) == size_bytes:
        request = Request.decode(received[:REQUEST_BYTES])
        if request.kind is Kind.HOLDS:
            continue
        sent = FORGED[0].tobytes().ljust(BlobLayout.of([type_of(FORGED[0])]).total_bytes, b"\0")
        if request.kind is Kind.MANIFEST:
            sent = Manifest(0, [type_of(FORGED[0])], WHOLE, live=True).encode().encode()
        header = Reply(Status.OK, 0, len(sent)).encode()
        victim.sendall(header + sent + tags.tag(header, sent))


def forge_state_under_own_key(victim: socket.socket, _: socket.socket) -> None:
    forge_state(victim, Macs(bytes(32)))


def forge_state_without_key(victim: socket.socket, _: socket.socket) -> None:
    """As in a job without a token, where each frame carries a checksum that any program can compute."""
    forge_state(victim, Checksums())


def change_state(victim: socket.socket, honest: socket.socket) -> None:
    """Put other values in the place of the donor's, and leave all else as it is."""
    true, forged = TRUE[0].tobytes(), FORGED[0].tobytes()
    relay(victim, honest, lambda piece: piece.replace(true, forged))


@contextmanager
def donor(incarnation: int, key: DataKey | None = KEY) -> Iterator[Listener]:
    store = StateStore()
    store.publish(0, TRUE)
    store.pin(HEAL, 0)
    with listening("group-0", incarnation, on_heal=HealServer(store).serve, key=key) as listener:
        yield listener


def healed(address: str, key: DataKey | None = KEY) -> list[object]:
    """The state that a joiner gets that knows group-0, incarnation 1, at an address."""
    fetcher = Fetcher(
        job="job",
        group="joiner",
        incarnation=3,
        heal_id=HEAL,
        donors=[DonorAt("group-0", 1, address)],
        timeout_s=PATIENCE_S,
        key=key,
    )
    try:
        return list(fetcher.state(0, list(map(type_of, TRUE)), cancel=Abort()))
    finally:
        fetcher.close()


def test_without_a_man_in_the_middle_the_state_arrives() -> None:
    with donor(1) as honest:
        with man_in_the_middle(honest.port, lambda victim, door: relay(victim, door, bytes)) as address:
            assert same_bits(healed(address), TRUE)


def test_a_joiner_takes_no_state_at_the_address_of_a_group_that_is_gone() -> None:
    """The handshake is relayed to another incarnation of the group, which knows the token and is honest."""
    with donor(2) as honest, man_in_the_middle(honest.port, forge_state_under_own_key) as address:
        with pytest.raises(
            HealFailed, match="The request is for incarnation 1 of group 'group-0'; this process is inc"
        ):
            healed(address)


@pytest.mark.parametrize("attack", [forge_state_under_own_key, change_state])
def test_a_joiner_takes_no_state_of_who_sits_on_the_path(attack: Then) -> None:
    with donor(1) as honest, man_in_the_middle(honest.port, attack) as address:
        with pytest.raises(HealFailed, match="was damaged or changed"):
            healed(address)


def test_the_forger_knows_its_trade() -> None:
    """Where there is no token, its state is taken. So in the other tests it is the token that keeps it out."""
    with donor(1, key=None) as honest, man_in_the_middle(honest.port, forge_state_without_key) as address:
        assert same_bits(healed(address, key=None), FORGED)


def test_a_joiner_takes_no_state_with_checksums_in_place_of_macs() -> None:
    with donor(1) as honest, man_in_the_middle(honest.port, forge_state_without_key) as address:
        with pytest.raises(HealFailed, match="closed the connection with 8 of 16 bytes missing"):
            healed(address)


# ---- exchanges ----

LAYOUT = Layout.of((LeafSpec("x", (1000,), "float32"),))


def members(addresses: list[str]) -> list[Peer]:
    return [Peer(f"group-{i}", 7 + i, address, (i,)) for i, address in enumerate(addresses)]


def exchanged(listener: Listener, of: list[Peer], me: int) -> list[np.ndarray]:
    links = _grid_links.open_links(
        listener,
        job="job",
        quorum_id=QUORUM,
        me=of[me].group,
        members=of,
        abort=Abort(),
        patience=Patience(PATIENCE_S),
    )
    try:
        return run_exchange(links, partials_of(LAYOUT, 2, [me]), step=STEP, progress_timeout_s=PATIENCE_S)
    finally:
        links.close()


def forge_sum(victim: socket.socket, _: socket.socket) -> None:
    """Take group-1's part in the exchange, with a contribution of another layout's values.

    It reads nothing: it could not decode the victim's frames, and would close before its own frames have left.
    """
    forger, mouth = socket.socketpair()
    links = Links(
        job="job",
        quorum_id=QUORUM,
        me=1,
        members=members(["", ""]),
        connections={0: Connection.sealed(forger, outgoing=bytes(32), incoming=bytes(32))},
        abort=Abort(),
    )

    def contribute() -> None:
        with contextlib.suppress(ExchangeFailed):
            run_exchange(links, partials_of(LAYOUT, 2, [1]), step=STEP)

    threads = [
        threading.Thread(target=contribute),
        threading.Thread(target=relayed_bytes, args=(mouth, victim, bytes)),
    ]
    for thread in threads:
        thread.start()
    with mouth:
        with contextlib.suppress(OSError):
            while victim.recv(1 << 16):
                pass
        mouth.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            patience.join(thread)
    forger.close()


def flip(piece: bytes) -> bytes:
    """Change one byte in the middle of a piece that is large enough to be a payload."""
    at = len(piece) // 2
    return piece if len(piece) < 1000 else piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]


def test_a_member_adds_nothing_of_who_has_the_address_of_a_member_that_is_gone() -> None:
    with listening("group-0", 7) as ours, listening("group-2", 9) as honest:
        with man_in_the_middle(honest.port, forge_sum) as address:
            of = members([f"127.0.0.1:{ours.port}", address])
            with pytest.raises(
                ExchangeFailed, match="The request is for incarnation 8 of group 'group-1'"
            ) as caught:
                exchanged(ours, of, 0)
        assert caught.value.peers == ("group-1",)


@pytest.mark.usefixtures("lane")
@pytest.mark.parametrize("attack", [forge_sum, lambda victim, honest: relay(victim, honest, flip)])
def test_a_member_adds_nothing_of_who_sits_on_the_path(attack: Then) -> None:
    with ExitStack() as stack:
        ours, theirs = (stack.enter_context(listening(f"group-{i}", 7 + i)) for i in range(2))
        address = stack.enter_context(man_in_the_middle(theirs.port, attack))
        of = members([f"127.0.0.1:{ours.port}", address])

        def other() -> None:
            with contextlib.suppress(ExchangeFailed):
                exchanged(theirs, of, 1)

        thread = threading.Thread(target=other)
        thread.start()
        with pytest.raises(
            ExchangeFailed, match=r"group 'group-1' .* damaged or changed on the way"
        ) as caught:
            exchanged(ours, of, 0)
        assert caught.value.peers == ("group-1",)
        theirs.forget(QUORUM)
        thread.join(PATIENCE_S)


def test_without_a_man_in_the_middle_the_sum_is_right(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = _compiled.library()
    assert (library is None) == (lane == "python")
    if library is not None and library.macs is not None:
        monkeypatch.delattr(Macs, "tag")  # so what holds in these tests holds for the MACs of C
    with listening("group-0", 7) as ours, listening("group-1", 8) as theirs:
        of = members([f"127.0.0.1:{listener.port}" for listener in (ours, theirs)])
        thread = threading.Thread(target=exchanged, args=(theirs, of, 1))
        thread.start()
        means = exchanged(ours, of, 0)
        thread.join()
        assert [mean.tobytes() for mean in means] == [m.tobytes() for m in reference_means(LAYOUT.specs, 2)]

"""A man in the middle who does anything at all to what passes, by seed: it ends as it should, or with an error.

Whatever he changes, adds, repeats, leaves out or puts in another order, on a connection of the data plane whose job
has a token: no wrong byte reaches a state or a sum.
"""

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from jaxft._errors import ExchangeFailed, HealFailed
from tests.exchange.members import reference_means
from tests.heal.donors import same_bits
from tests.security import test_relays as relays

SEEDS = 40


def changed(piece: bytes, rng: random.Random, earlier: list[bytes]) -> list[bytes]:
    """The pieces that replace a piece."""
    at = rng.randrange(len(piece))
    match rng.randrange(8):
        case 0:  # flip a bit
            return [piece[:at] + bytes([piece[at] ^ 1 << rng.randrange(8)]) + piece[at + 1 :]]
        case 1:  # leave some out
            return [piece[:at], piece[at + rng.randrange(1, 64) :]]
        case 2:  # add something
            return [piece[:at], rng.randbytes(rng.randrange(1, 64)), piece[at:]]
        case 3:  # repeat it
            return [piece, piece]
        case 4:  # repeat an earlier piece, in its place or before it
            return [rng.choice(earlier), piece] if rng.random() < 0.5 else [rng.choice(earlier)]
        case 5:  # two halves in another order
            return [piece[at:], piece[:at]]
        case 6:  # overwrite a stretch
            length = rng.randrange(1, 1 + len(piece) - at)
            return [piece[:at], rng.randbytes(length), piece[at + length :]]
        case _:  # end it
            return [piece[:at], b""]


def carry(source: socket.socket, target: socket.socket, rng: random.Random, quiet: int) -> None:
    """Carry bytes as they come, and change one piece after a number of quiet ones."""
    earlier: list[bytes] = []
    with contextlib.suppress(OSError):
        while piece := source.recv(rng.choice((64, 500, 4096))):
            earlier.append(piece)
            pieces = changed(piece, rng, earlier) if quiet == 0 else [piece]
            quiet -= 1
            target.sendall(b"".join(pieces))
            if pieces[-1] == b"" and len(pieces) == 2:
                break
    for sock in (source, target):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


@contextmanager
def attacked(port: int, seed: int) -> Iterator[str]:
    """An address that leads to a port through the man in the middle. He leaves the first few pieces alone."""
    rng = random.Random(seed)
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:
        threads: list[threading.Thread] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near = stack.enter_context(server.accept()[0])
                    far = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                    for one, other in ((near, far), (far, near)):
                        arguments = (one, other, random.Random(rng.random()), rng.randrange(12))
                        threads.append(threading.Thread(target=carry, args=arguments))
                        threads[-1].start()

        accepting = threading.Thread(target=serve)
        accepting.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        accepting.join()
        for thread in threads:
            thread.join()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What he leaves out is waited for; not long."""
    monkeypatch.setattr(relays, "PATIENCE_S", 1.0)


def outcomes(attack: Callable[[int], bool]) -> None:
    """Run all seeds; each is right or fails, and some of each kind."""
    right = [attack(seed) for seed in range(SEEDS)]
    assert any(right)
    assert not all(right)


def test_a_joiner_gets_the_true_state_or_none() -> None:
    def attack(seed: int) -> bool:
        with relays.donor(1) as honest, attacked(honest.port, seed) as address:
            try:
                got = relays.healed(address)
            except HealFailed:
                return False
            assert same_bits(got, relays.TRUE), f"seed {seed}: a false state was taken"
            return True

    outcomes(attack)


def test_members_get_the_right_sum_or_none() -> None:
    wanted = [mean.tobytes() for mean in reference_means(relays.LAYOUT.specs, 2)]

    def attack(seed: int) -> bool:
        sums: list[list[np.ndarray]] = []

        def take_part(me: int) -> None:
            with contextlib.suppress(ExchangeFailed):
                sums.append(relays.exchanged(listeners[me], of, me))

        with ExitStack() as stack:
            listeners = [stack.enter_context(relays.listening(f"group-{i}", 7 + i)) for i in range(2)]
            path = stack.enter_context(attacked(listeners[1].port, seed))
            of = relays.members([f"127.0.0.1:{listeners[0].port}", path])
            threads = [threading.Thread(target=take_part, args=(me,)) for me in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for means in sums:
            assert [mean.tobytes() for mean in means] == wanted, f"seed {seed}: a wrong sum was taken"
        return len(sums) == 2

    outcomes(attack)

"""Which errors come from a running program, such as a collective that lost a rank."""

import jax
import jax.numpy as jnp
import pytest

from jaxft._ranks import _link
from jaxft._ranks._link import came_from_xla, end_if_lost
from jaxft._ranks._ranks import OneRank

LOST = (
    "UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/pair.cc:538] Connection reset by peer"
)
NETWORK = (
    "INTERNAL: external/xla/xla/backends/gpu/collectives/nccl_errors.cc:1: NCCL operation ncclGroupEnd() failed: "
    "unhandled system error. Last NCCL warning(error) log entry (may be unrelated) ''."
)


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, jax.errors.JaxRuntimeError])
def test_a_status_of_xla_is_known_in_whatever_type_it_comes(kind: type[Exception]) -> None:
    assert came_from_xla(kind(LOST))


def test_it_is_known_below_an_error_that_was_raised_from_it() -> None:
    error = KeyError("loss")
    error.__cause__ = ValueError(LOST)
    assert came_from_xla(error)


def test_errors_that_were_raised_from_each_other_are_looked_at_once() -> None:
    one, other = KeyError("one"), KeyError("other")
    one.__cause__, other.__cause__ = other, one
    assert not came_from_xla(one)


def test_what_a_program_raises_on_the_device_is_one() -> None:
    def fail(_value: object) -> object:
        raise OSError("the disk is full")

    ask = jax.jit(lambda x: jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), x))
    with pytest.raises(Exception, match="the disk is full") as caught:
        jax.block_until_ready(ask(1.0))
    assert came_from_xla(caught.value)


@pytest.mark.parametrize("kind", [ValueError, jax.errors.JaxRuntimeError])
def test_a_rank_without_memory_has_lost_no_other(kind: type[Exception]) -> None:
    """It would wait for that loss, and the other groups for it."""
    assert not came_from_xla(kind("RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes."))


@pytest.mark.parametrize(
    "error", [None, OSError("cannot read sample 17"), ValueError("loss UNKNOWN: 3"), KeyError("INTERNAL")]
)
def test_an_error_of_the_program_is_not(error: BaseException | None) -> None:
    assert not came_from_xla(error)


class Ended(BaseException):
    """In place of the end of this process."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(_name: str, other: str, why: str) -> None:
        raise Ended(f"{other} is lost ({why})")

    monkeypatch.setattr(_link, "end_with", end)


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize("kind", [ValueError, jax.errors.JaxRuntimeError])
@pytest.mark.parametrize("text", [LOST, NETWORK])
def test_a_collective_whose_connection_breaks_while_all_ranks_live_is_no_error_of_the_program(
    kind: type[Exception], text: str
) -> None:
    error = KeyError("loss")
    error.__cause__ = kind(text)
    with pytest.raises(Ended, match=r"another rank is lost .*in a computation of all ranks: ") as ended:
        end_if_lost(OneRank(), "a", error)
    assert text in str(ended.value)


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize(
    "error",
    [
        None,
        OSError("Gloo AllGather failed: not a status of XLA"),
        jax.errors.JaxRuntimeError("INTERNAL: CpuCallback error: OSError: the disk is full"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: NCCL operation ncclGroupEnd() failed: no memory"),
    ],
)
def test_the_programs_own_error_goes_on_to_its_user(error: BaseException | None) -> None:
    end_if_lost(OneRank(), "a", error)

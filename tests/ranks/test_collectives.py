"""Which errors are those of a running program, such as a collective that lost a rank."""

import jax
import jax.numpy as jnp
import pytest

from jaxft._ranks._collectives import came_from_xla

LOST = (
    "UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/pair.cc:538] Connection reset by peer"
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
    def fail(value: object) -> object:
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

"""jax_debug_nans and jax_debug_infs name the operation and its line, as they do for jax.jit, and nothing is lost."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxft
from jaxft_launch.processes._ranks import free_ports
from tests import patience

GOOD = np.array([4, 6, 8], np.float32)
HERE = rf"{__file__}:\d+ \({{}}\)"
Loss = Callable[[jax.Array, jax.Array], jax.Array]


@pytest.fixture(autouse=True)
def debugging() -> Iterator[None]:
    with jax.debug_nans(True):
        yield


@pytest.fixture
def by_option(debugging: None) -> Iterator[None]:
    """For the whole process, as JAX_DEBUG_NANS does it."""
    with jax.debug_nans(False):
        pass
    jax.config.update("jax_debug_nans", True)
    yield
    jax.config.update("jax_debug_nans", False)


def plain(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sqrt(x) * w)


@jax.jit
def jitted(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sqrt(x) * w)


def scanned(w: jax.Array, x: jax.Array) -> jax.Array:
    def body(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        return carry + jnp.sqrt(row - carry), None

    return jnp.sum(w * jax.lax.scan(body, jnp.zeros(()), x)[0])


def looped(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(w) * jax.lax.fori_loop(0, 3, lambda at, total: total + jnp.sqrt(x[at]), jnp.zeros(()))


def recomputed(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.checkpoint(plain)(w, x)


def stepping(loss: Loss, **options: Any) -> Any:
    def train_step(state: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state, batch)
        return state - 0.1 * jaxft.pmean(grads), jaxft.pmean(value)

    return jaxft.fault_tolerant(train_step, None, **options)


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize(
    ("loss", "operation", "function"),
    [
        (plain, "sqrt", "plain"),
        (jitted, "sqrt", "jitted"),
        (scanned, "sqrt", "scanned.<locals>.body"),
        (looped, "sqrt|scan", "looped.*"),
        (recomputed, "sqrt", "plain"),
    ],
)
def test_the_operation_is_named_with_its_line(
    loss: Loss, operation: str, function: str, overlap: int
) -> None:
    step = stepping(loss, overlap=overlap)
    state, _ = step(jnp.ones(3), GOOD)
    before = jaxft.digest(state)
    for _ in range(2):
        with pytest.raises(
            FloatingPointError, match=rf"makes a NaN: `({operation})` at " + HERE.format(function)
        ):
            step(state, -GOOD)
    assert (step.step, jaxft.digest(state)) == (1, before)
    step(state, GOOD)
    assert step.step == 2


def test_of_a_scan_all_iterations_are_looked_at() -> None:
    step = stepping(scanned)
    with pytest.raises(FloatingPointError, match=r"makes a NaN: `sqrt` at .*scanned\.<locals>\.body"):
        step(jnp.ones(3), np.array([4, 1, 9], np.float32))  # the second takes the root of -1


def test_of_a_scan_from_the_last_row_on_the_iterations_are_run_in_that_order() -> None:
    def backwards(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
            return jnp.sqrt(row - carry), None

        return jnp.sum(w * jax.lax.scan(body, jnp.zeros(()), x, reverse=True)[0])

    with pytest.raises(FloatingPointError, match=r"makes a NaN: `sqrt` at .*backwards\.<locals>\.body"):
        # From the first row on, no root would be that of a negative number.
        stepping(backwards)(jnp.ones(3), np.array([1, 5, 4], np.float32))


def test_each_setting_finds_its_kind() -> None:
    step = stepping(lambda w, x: jnp.sum(w / x))
    with jax.debug_nans(False), jax.debug_infs(True):
        state, _ = step(jnp.ones(3), np.ones(3, np.float32))
        with pytest.raises(
            FloatingPointError, match=r"`compute` makes an infinity: `div` at .*debug_infs is set"
        ):
            step(state, np.zeros(3, np.float32))


def test_one_that_only_an_input_holds_is_not_blamed_on_an_operation() -> None:
    def train_step(state: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        return state - jaxft.pmean(batch), batch

    step = jaxft.fault_tolerant(train_step, None)
    state, _ = step(jnp.ones(3), np.ones(3, np.float32))
    with pytest.raises(FloatingPointError, match="run again operation by operation"):
        step(state, np.full(3, np.nan, np.float32))


def test_one_of_the_update_is_named_by_its_program() -> None:
    def train_step(state: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.log(state - jaxft.pmean(batch)), jaxft.pmean(jnp.sum(batch))

    step = jaxft.fault_tolerant(train_step, None)
    with pytest.raises(
        FloatingPointError, match=r"`apply` makes a NaN: (`log` at |it has consumed its state)"
    ):
        step(jnp.ones(3), np.full(3, 2, np.float32))


def test_of_a_mesh_the_equation_is_named_if_what_is_within_cannot_run_alone() -> None:
    mesh = jax.make_mesh((1,), ("x",))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def inner(x: jax.Array) -> jax.Array:
            return jnp.sqrt(x) + jax.lax.axis_index("x").astype(x.dtype)

        return jnp.sum(w * jax.shard_map(inner, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(x))

    with pytest.raises(FloatingPointError, match=r"makes a NaN: `(sqrt|shard_map)` at "):
        stepping(loss)(jnp.ones(3), -GOOD)


@pytest.mark.usefixtures("by_option")
@pytest.mark.parametrize("at", [0, 1, 5])
def test_the_option_of_a_process_finds_it_in_every_call(at: int) -> None:
    """What JAX itself does within a call ends its look at later results."""
    step = stepping(plain)
    state: Any = jnp.ones(3)
    for _ in range(at):
        state, _ = step(state, GOOD)
    for _ in range(2):
        with pytest.raises(FloatingPointError, match="`sqrt` at "):
            step(state, -GOOD)
    with pytest.raises(FloatingPointError):
        jax.jit(jnp.log)(-GOOD)


@pytest.mark.long
def test_one_of_several_processes_does_not_wait_for_the_others_to_find_it() -> None:
    """Only one has it in its part of the batch; the others go on to their next collective."""
    port = free_ports(1)[0]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.programs.nan_in_one_process", str(rank), str(port)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [patience.communicate(rank)[0] for rank in ranks]
    assert "`compute` makes a NaN: it belongs to several processes" in said[1]
    assert [rank.returncode for rank in ranks] == [0, 0], said

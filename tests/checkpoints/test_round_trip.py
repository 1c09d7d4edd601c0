"""A saved state comes back, wherever it lies afterwards, and plain Orbax can read it."""

import ctypes
import dataclasses
import importlib
import importlib.util
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxft
from jaxft import ConfigurationError
from jaxft._checkpoints import Checkpoints, _folder
from tests import patience

from .states import PATIENCE_S, of_equinox, of_everything, of_nnx, of_optax, restored, same, save, saved


@pytest.mark.parametrize("make", [of_optax, of_nnx, of_equinox, of_everything])
def test_a_state_comes_back(make: Callable[[int], Any], tmp_path: Path) -> None:
    state = make(1)
    checkpoints = Checkpoints(tmp_path / "new" / "folder")
    assert checkpoints.restore(make(0), job="docs") is None
    checkpoints.save(5, state, job="docs", history=2**62 + 1)
    checkpoints.finish(PATIENCE_S)
    found = restored(Checkpoints(tmp_path / "new" / "folder"), make(0))
    assert same(found.state, state)
    assert (found.step, found.history) == (5, 2**62 + 1)
    assert found.digest == jaxft.digest(state)
    assert found.folder == tmp_path / "new" / "folder" / "5"


def test_numbers_become_what_the_step_makes_of_them(tmp_path: Path) -> None:
    """A first state may hold numbers; a saved state has arrays."""
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1, {"n": jnp.int32(3), "x": jnp.float32(0.5)})
    found = restored(checkpoints, {"n": 0, "x": 0.0})
    n, x = found.state.values()
    assert isinstance(n, jax.Array)
    assert (int(n), n.dtype, n.weak_type) == (3, jnp.int32, True)
    assert (float(x), x.dtype, x.weak_type) == (0.5, jnp.float32, True)


def test_another_sharding(tmp_path: Path) -> None:
    mesh = jax.make_mesh((2, 2), ("x", "y"))
    values = {"w": np.arange(64.0, dtype=np.float32).reshape(8, 8), "b": np.arange(8, dtype=np.int32)}

    def lying(w: P, b: P) -> dict[str, jax.Array]:
        return {
            "w": jax.device_put(values["w"], NamedSharding(mesh, w)),
            "b": jax.device_put(values["b"], NamedSharding(mesh, b)),
        }

    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1, lying(P("x", "y"), P()))
    for like in (lying(P("x", "y"), P()), lying(P("y"), P(("x", "y"))), jax.tree.map(jnp.array, values)):
        zeros = jax.tree.map(jnp.zeros_like, like)
        found = restored(checkpoints, zeros)
        assert jax.tree.map(lambda leaf: leaf.sharding, found.state) == jax.tree.map(
            lambda leaf: leaf.sharding, zeros
        )
        assert [leaf.committed for leaf in found.state.values()] == [
            leaf.committed for leaf in zeros.values()
        ]
        assert same(found.state, like)


@pytest.mark.parametrize("spec", [P(), P("x")])
def test_a_state_may_be_overwritten_as_soon_as_save_returns(
    spec: P, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = jax.make_mesh((4,), ("x",))
    state = {
        "w": jax.device_put(jnp.arange(1 << 16, dtype=jnp.float32), NamedSharding(mesh, spec)),
        "key": jax.random.key(5),
    }
    before, like = jaxft.digest(state), jax.tree.map(jnp.copy, state)
    overwritten = threading.Event()
    monkeypatch.setattr(_folder, "sweep", lambda _: overwritten.wait(PATIENCE_S))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, job="docs", history=0)
    # Donating alone would not show an alias: JAX copies an array that has a host view. So its memory is written to.
    for shard in state["w"].addressable_shards:
        ctypes.memset(shard.data.unsafe_buffer_pointer(), 0xFF, shard.data.nbytes)
    donated = jax.jit(lambda tree: tree | {"w": tree["w"] * 0}, donate_argnums=0)(state)
    jax.block_until_ready(donated)
    assert state["w"].is_deleted()
    overwritten.set()
    checkpoints.finish(PATIENCE_S)
    found = restored(checkpoints, like)
    assert found.digest == jaxft.digest(found.state) == before


def test_plain_orbax_reads_it(tmp_path: Path) -> None:
    ocp: Any = importlib.import_module("orbax.checkpoint.experimental.v1")
    saved(tmp_path, 5, 10)
    state = of_optax(10)
    with ocp.training.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest is not None
        assert checkpointer.latest.step == 10
    as_it_is = ocp.load(tmp_path / "10")
    assert as_it_is["params"]["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(as_it_is["params"]["w"], state.params["w"])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    assert same(ocp.load(tmp_path / "10", like), state)
    metadata = ocp.metadata(tmp_path / "10").custom_metadata
    assert isinstance(metadata, dict)
    assert [metadata[name] for name in ("step", "job", "history")] == [10, "docs", 7]
    assert metadata["digest"] == jaxft.digest(state)
    assert json.loads(json.dumps(metadata)) == metadata


def test_another_state_is_refused(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 5)
    like = of_optax()
    like.params["w"] = jnp.zeros((64, 32), jnp.float32)
    with pytest.raises(ConfigurationError, match=r"\.params\['w'\] is bfloat16\[64, 32\] in it, but float32"):
        checkpoints.restore(like, job="docs")
    like.params["w"] = jnp.zeros((32, 64), jnp.bfloat16)
    with pytest.raises(ConfigurationError, match=r"is bfloat16\[64, 32\] in it, but bfloat16\[32, 64\]"):
        checkpoints.restore(like, job="docs")
    like = of_optax()
    del like.params["w"]
    with pytest.raises(ConfigurationError, match=r"has a leaf \.params\['w'\]"):
        checkpoints.restore(like, job="docs")
    like = of_optax()
    like.params["more"] = jnp.zeros(())
    with pytest.raises(
        ConfigurationError, match=r"lacks the leaf \.params\['more'\], float32\[\] in the given"
    ):
        checkpoints.restore(like, job="docs")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Before:
    w: Any
    b: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class After:
    """The same fields in another order."""

    b: Any
    w: Any


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (lambda w, b: Before(w, b), lambda w, b: After(b, w)),
        (lambda w, b: {"w": w, "b": b}, lambda w, b: {"w": w, "b": b, "none": None, "empty": {}}),
        (
            lambda w, _b: optax.chain(optax.adam(1.0), optax.identity()).init(w),
            lambda w, _b: optax.chain(optax.adam(1.0)).init(w),
        ),
        (lambda w, b: {0: w, 1: b}, lambda w, b: [w, b]),
    ],
    ids=["fields in another order", "empty nodes", "a part without a state", "another container"],
)
def test_the_same_leaves_in_another_structure_are_restored(
    was: Callable[[Any, Any], Any], now: Callable[[Any, Any], Any], tmp_path: Path
) -> None:
    """As of a program that was edited since: nothing is damaged then."""
    w, b = jnp.arange(6.0).reshape(2, 3), jnp.ones(3, jnp.bfloat16)
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1, was(w, b))
    found = restored(checkpoints, jax.tree.map(jnp.zeros_like, now(w, b)))
    assert same(found.state, now(w, b))


@pytest.mark.parametrize(
    "options", [{"every_steps": 0}, {"keep": 0}, {"folder": ""}, {"folder": "gs://bucket/folder"}]
)
def test_what_cannot_be_right_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Checkpoints(**{"folder": "somewhere", **options})


@pytest.mark.parametrize("missing", [None, ModuleNotFoundError("No module named 'orbax'")])
def test_without_orbax(missing: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(_name: str) -> None:
        if missing:
            raise missing

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(ConfigurationError, match="pip install orbax-checkpoint"):
        Checkpoints("somewhere")


def test_orbax_is_imported_late() -> None:
    code = (
        "import sys, jaxft._checkpoints as c; c.Checkpoints('somewhere').steps(); "
        "print([m for m in sys.modules if m.startswith(('orbax.', 'tensorstore'))])"
    )
    done = patience.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr

"""`jaxft.global_norm`: the same bits on every mesh, fused or not, as numpy computes them one rounding at a time."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxft
from tests.step_models import mostly_long

SHAPES = [(), (1000,), (128, 33), (2, 1, 65, 4)]
SEEDS = 16


def in_numpy(*leaves: np.ndarray) -> np.floating:
    """The norm of float32 leaves by the same algorithm. Numpy fuses nothing."""
    sums = [np.float32(0)][:0]
    for leaf in leaves:
        large = np.where(np.abs(leaf) < 2.0**-50, np.float32(0), leaf)
        high = (large.view(np.uint32) & np.uint32(0xFFFFF000)).view(np.float32)
        squares = high * high + (high + high) * (large - high)
        blocks = [math.gcd(length, 64) for length in leaf.shape]
        cut = squares.reshape(
            [n for length, b in zip(leaf.shape, blocks, strict=True) for n in (b, length // b)]
        )
        for axis in range(1, cut.ndim, 2):
            cut = halved(cut, axis)
        sums.extend(cut.reshape(-1))
    return np.sqrt(halved(np.array(sums), 0)[0])


def halved(array: np.ndarray, axis: int) -> np.ndarray:
    while array.shape[axis] > 1:
        half = array.shape[axis] // 2
        first, second, rest = np.split(array, [half, 2 * half], axis)
        array = np.concatenate([first + second, rest], axis)
    return array


def random_leaf(seed: int, *shape: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.asarray(
        random.standard_normal(shape, np.float32) * np.float32(2) ** random.integers(-9, 9, shape), np.float32
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_what_numpy_computes_fused_or_not(shape: tuple[int, ...]):
    fused = jax.jit(jaxft.global_norm)
    for seed in range(3):
        leaf = random_leaf(seed, *shape)
        wanted = in_numpy(leaf)
        assert fused(leaf) == wanted
        assert fused(leaf).dtype == jnp.float32
        assert wanted == pytest.approx(np.sqrt(np.sum(np.float64(leaf) ** 2)), rel=3e-7)


def meshes(axis_type: AxisType) -> list[Mesh]:
    shapes = ((1, 1), (4, 1), (2, 2))
    return [
        jax.make_mesh((a, b), ("a", "b"), (axis_type,) * 2, devices=jax.devices()[: a * b]) for a, b in shapes
    ]


def norms(
    norm, tree: dict[str, np.ndarray], specs: dict[str, P], axis_type: AxisType = AxisType.Auto
) -> list[Sequence[float]]:
    """The norms of `SEEDS` trees like this one, on each mesh."""
    trees = [{name: np.roll(leaf, seed) for name, leaf in tree.items()} for seed in range(SEEDS)]
    found = []
    for mesh in meshes(axis_type):
        places = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
        program = jax.jit(norm, in_shardings=(places,))
        found.append([float(program(jax.device_put(each, places))) for each in trees])
    return found


TREE = {"w": random_leaf(1, 64, 96), "b": random_leaf(2, 96), "stack": random_leaf(3, 3, 40, 16)}
SPECS = [
    {"w": P("a", "b"), "b": P("b"), "stack": P(None, "a", "b")},
    {"w": P(None, ("a", "b")), "b": P(), "stack": P(None, ("b", "a"))},
    {"w": P("b"), "b": P("a"), "stack": P()},
]


CASES = [
    (SPECS[0], AxisType.Auto),
    (SPECS[0], AxisType.Explicit),
    (SPECS[1], AxisType.Explicit),
    (SPECS[2], AxisType.Auto),
]


@pytest.mark.parametrize(("specs", "axis_type"), mostly_long(CASES, CASES[0], CASES[2]), ids=str)
def test_every_mesh_gives_the_same_bits(specs: dict[str, P], axis_type: AxisType):
    one, *others = norms(jaxft.global_norm, TREE, specs, axis_type)
    assert all(other == one for other in others)
    assert len(set(one)) > 1, "rolled trees are other trees"


def test_the_usual_norm_does_not():
    """Otherwise the test above would say nothing."""
    one, *others = norms(
        lambda tree: jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in tree.values())), TREE, SPECS[0]
    )
    assert any(other != one for other in others)


def test_several_leaves_are_added_in_their_order():
    leaves = [random_leaf(seed, *shape) for seed, shape in enumerate(SHAPES)]
    assert jax.jit(jaxft.global_norm)(leaves) == in_numpy(*leaves)


@pytest.mark.long
def test_narrow_wide_and_complex_numbers():
    leaf = random_leaf(0, 12, 10)
    narrow = jnp.asarray(leaf, jnp.bfloat16)
    assert jaxft.global_norm(narrow) == in_numpy(np.asarray(narrow, np.float32))
    assert jaxft.global_norm(leaf + 2j * leaf) == in_numpy(leaf, 2 * leaf)
    with jax.enable_x64(True):
        wide = np.float64(leaf) * (1 + 2.0**-40)
        assert jaxft.global_norm(wide).dtype == np.float64
        assert float(jaxft.global_norm(wide)) == pytest.approx(np.linalg.norm(wide), rel=1e-15)


@pytest.mark.parametrize(
    ("tree", "norm"),
    [({}, 0.0), ([np.zeros((0, 3), np.float32)], 0.0), (np.float32(-3), 3.0), (np.zeros(5, np.float32), 0.0)],
)
def test_small_trees(tree, norm: float):
    assert jaxft.global_norm(tree) == norm


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_what_is_not_finite_stays_so(value: float):
    assert not np.isfinite(jaxft.global_norm(np.array([1, value], np.float32)))


@pytest.mark.long
def test_its_derivative():
    leaf = random_leaf(0, 6, 8)
    found = jax.grad(jaxft.global_norm)(leaf)
    np.testing.assert_allclose(found, leaf / np.linalg.norm(leaf), rtol=1e-6)


def test_integers_are_refused():
    with pytest.raises(TypeError, match=r"not int32\[2\]. Leave integer leaves out"):
        jaxft.global_norm({"count": jnp.arange(2)})

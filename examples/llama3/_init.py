"""The initial weights of Llama 3, drawn as TorchTitan does.

| weights | standard deviation |
| --- | --- |
| embedding | 1; tied, as the head |
| query, key, value, gate | 0.02 |
| output, up, down of layer i | 0.02 / sqrt(2 (i + 1)) |
| head | dim^-0.5 |

The bits are those of `jax.random.bits`: threefry numbers each element by its index in the whole array, so each device
draws its own part, and no mesh changes a bit. But it is written here as arithmetic on the index alone, which compiles
into one loop without temporaries. JAX's own on CPUs keeps several arrays as large as the leaf: 664 GB for 405B.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

INIT_STDDEV = 0.02
CUT_AT = 3.0  # standard deviations

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # of threefry2x32, 20 rounds (Salmon et al., 2011)
_PARITY = 0x1BD11BDA


def stddev_by_depth(layers: int) -> np.ndarray:
    """Return the standard deviations, (layers,), of what leads to the residual stream: less in deeper layers."""
    return INIT_STDDEV / np.sqrt(2 * np.arange(1, layers + 1, dtype=np.float32))


# Traced once for each shape: the model is built several times before it is compiled.
@functools.partial(jax.jit, static_argnums=1)
def truncated_normal(key: jax.Array, shape: tuple[int, ...], stddev: jax.typing.ArrayLike) -> jax.Array:
    """Return float32 normal noise, without values beyond three standard deviations.

    Args:
        stddev: before the truncation; one, or one for each index of the first axis.
    """
    scale = jnp.asarray(stddev, jnp.float32)
    scale = jnp.broadcast_to(scale.reshape(scale.shape + (1,) * (len(shape) - scale.ndim)), shape)
    uniform = (random_bits(key, shape) >> 9).astype(jnp.float32) * 2.0**-23
    edge = math.erf(CUT_AT / math.sqrt(2))
    noise = math.sqrt(2) * jax.lax.erf_inv(uniform * (2 * edge) - edge)
    return scale * jnp.clip(noise, -CUT_AT, CUT_AT)


def random_bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return uint32 noise with the bits of `jax.random.bits`."""
    first, second = jax.random.key_data(key)
    keys = (first, second, first ^ second ^ jnp.uint32(_PARITY))
    high, low = _index(shape)
    high, low = high + keys[0], low + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            high = high + low
            low = high ^ (low << rotation | low >> (32 - rotation))
        high = high + keys[(group + 1) % 3]
        low = low + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return high ^ low


def _index(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return each element's row-major index, of 64 bits, as two arrays of 32."""
    high, low = jnp.zeros(shape, jnp.uint32), jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        along = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        more_high, more_low = _product(along, math.prod(shape[axis + 1 :]))
        low = low + more_low
        high = high + more_high + (low < more_low).astype(jnp.uint32)  # the carry
    return high, low


def _product(x: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """Return the high and low word of x times a constant of up to 64 bits, by halves of 16 bits."""
    upper, lower = jnp.uint32(factor >> 32), factor & 0xFFFFFFFF
    left, right = (x & 0xFFFF, x >> 16), (jnp.uint32(lower & 0xFFFF), jnp.uint32(lower >> 16))
    low, crossed, other = left[0] * right[0], left[0] * right[1], left[1] * right[0]
    middle = (low >> 16) + (crossed & 0xFFFF) + (other & 0xFFFF)
    high = left[1] * right[1] + (crossed >> 16) + (other >> 16) + (middle >> 16) + x * upper
    return high, (low & 0xFFFF) | middle << 16

"""The initial weights, drawn as TorchTitan draws those of Llama 3.

| weights | standard deviation |
| --- | --- |
| embedding | 1; tied, as the head |
| query, key, value, gate | 0.02 |
| output, up, down of layer i | 0.02 / sqrt(2 (i + 1)) |
| head | dim^-0.5 |

JAX's threefry numbers each element by its index in the whole array, so each device draws its own part, and the bits
do not depend on the mesh.
"""

import jax
import jax.numpy as jnp
import numpy as np

INIT_STDDEV = 0.02
CUT_AT = 3.0  # standard deviations


def stddev_by_depth(layers: int) -> np.ndarray:
    """Return the standard deviations, (layers,), of what leads to the residual stream: less in deeper layers."""
    return INIT_STDDEV / np.sqrt(2 * np.arange(1, layers + 1, dtype=np.float32))


def truncated_normal(key: jax.Array, shape: tuple[int, ...], stddev: jax.typing.ArrayLike) -> jax.Array:
    """Return float32 normal noise, without values beyond three standard deviations.

    Args:
        stddev: before the truncation; one, or one for each index of the first axis.
    """
    scale = jnp.asarray(stddev, jnp.float32)
    scale = jnp.broadcast_to(scale.reshape(scale.shape + (1,) * (len(shape) - scale.ndim)), shape)
    return scale * jax.random.truncated_normal(key, -CUT_AT, CUT_AT, shape, jnp.float32)

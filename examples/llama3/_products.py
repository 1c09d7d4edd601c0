"""Matrix products whose backward products run in the compute dtype too, and whose weight gradients are float32.

Plain autodiff gets both wrong. A product with a float32 result has a float32 cotangent, and JAX then multiplies
float32 with bf16, in float32: a quarter of the speed or less. And the gradient of a weight that was cast to bf16 is
rounded to bf16 before devices add their parts of it; here each device's part keeps the product's float32 accumulator.
"""

import functools

import jax
import jax.numpy as jnp


def project(
    subscripts: str, x: jax.Array, weight: jax.Array, out_dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """Multiply an activation by a float32 weight, in the activation's dtype.

    Args:
        subscripts: as for einsum, such as "btd,dhk->bthk"; each index is in two of the three.
        x: the activation.
        weight: float32; cast to x's dtype for the product.
        out_dtype: of the result; None is x's. The product accumulates in float32 in any case.

    Returns:
        The product. Backward, the cotangent is cast to x's dtype; x's gradient has x's dtype, the weight's float32.
    """
    return _project(subscripts, x, weight, out_dtype or x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _project(subscripts: str, x: jax.Array, weight: jax.Array, out_dtype: jax.typing.DTypeLike) -> jax.Array:
    return jnp.einsum(subscripts, x, weight.astype(x.dtype), preferred_element_type=out_dtype)


def _project_forward(
    subscripts: str, x: jax.Array, weight: jax.Array, out_dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _project(subscripts, x, weight, out_dtype), (x, weight)


def _project_backward(
    subscripts: str,
    _out_dtype: jax.typing.DTypeLike,
    saved: tuple[jax.Array, jax.Array],
    cotangent: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    of_x, of_weight, of_out = subscripts.replace("->", ",").split(",")
    cotangent = cotangent.astype(x.dtype)
    x_gradient = jnp.einsum(f"{of_out},{of_weight}->{of_x}", cotangent, weight.astype(x.dtype))
    weight_gradient = jnp.einsum(
        f"{of_x},{of_out}->{of_weight}", x, cotangent, preferred_element_type=jnp.float32
    )
    return x_gradient, weight_gradient.astype(weight.dtype)


_project.defvjp(_project_forward, _project_backward)


def wide_product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiply two arrays of one dtype into float32; backward, the cotangent is cast to their dtype."""
    return _wide(subscripts, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _wide(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _wide_forward(
    subscripts: str, a: jax.Array, b: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _wide(subscripts, a, b), (a, b)


def _wide_backward(
    subscripts: str, saved: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    a, b = saved
    of_a, of_b, of_out = subscripts.replace("->", ",").split(",")
    cotangent = cotangent.astype(a.dtype)
    return (
        jnp.einsum(f"{of_out},{of_b}->{of_a}", cotangent, b),
        jnp.einsum(f"{of_out},{of_a}->{of_b}", cotangent, a),
    )


_wide.defvjp(_wide_forward, _wide_backward)

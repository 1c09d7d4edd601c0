"""What JAX keeps for each thread and a batch function may depend on: settings and a mesh, set by a `with`."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

# Each is a context manager of JAX, and `jax_...` in its configuration.
_SETTINGS = (
    *(
        "enable_x64",
        "default_device",
        "default_matmul_precision",
        "default_prng_impl",
        "threefry_partitionable",
    ),
    *("numpy_dtype_promotion", "numpy_rank_promotion", "debug_nans", "debug_infs", "disable_jit"),
)


class JaxContext(NamedTuple):
    """Those of one thread. `contextvars` do not have them."""

    settings: tuple[Any, ...]
    mesh: Any

    @staticmethod
    def of_this_thread() -> "JaxContext":
        settings = tuple(getattr(jax.config, f"jax_{name}") for name in _SETTINGS)
        return JaxContext(settings, jax.sharding.get_mesh())

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in this context, in whichever thread."""
        here = self.of_this_thread()
        with contextlib.ExitStack() as stack:
            for name, value, own in zip(_SETTINGS, self.settings, here.settings, strict=True):
                if value != own:
                    stack.enter_context(getattr(jax, name)(value))
            if self.mesh != here.mesh:
                stack.enter_context(jax.set_mesh(self.mesh))
            return function(*args)

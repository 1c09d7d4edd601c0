"""Programs that are compiled before they are called, and take more than compiled programs of JAX do."""

from collections.abc import Callable
from typing import Any


def compiled_ahead(jitted: Any, *like: Any) -> Callable[..., Any]:
    """A jitted program, compiled for arguments like these.

    Called through `jax.jit`, a program would be compiled twice: the leaves of a first state are often not committed
    to their devices, and later ones are. A compiled program takes both, and refuses leaves of int4 whose layout in
    memory is another, which jit takes: from then on jit is called.
    """
    program = jitted.lower(*like).compile()

    def call(*given: Any) -> Any:
        nonlocal program
        try:
            return program(*given)
        except ValueError:  # raised by the check of the arguments, before anything runs or is donated
            program = jitted
            return jitted(*given)

    return call

"""Programs of ours: as if the program had set no mesh, and compiled before they are called.

Under a mesh that the program has set with `jax.set_mesh`, JAX makes new arrays on all its devices, and a process of
several cannot bring these back to one device. It also compiles for no devices in another order than the mesh's.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

_NO_MESH = Mesh(np.empty((), object), ())


def no_mesh() -> AbstractContextManager[object]:
    """A context in which no mesh is set."""
    return jax.set_mesh(_NO_MESH)


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

"""Operations of ours run as if the program had set no mesh, with `jax.set_mesh`.

Under one, JAX makes new arrays on all its devices, and a process of several cannot bring these back to one device. It
also compiles for no devices in another order than the mesh's.
"""

from contextlib import AbstractContextManager

import jax
import numpy as np
from jax.sharding import Mesh

_NO_MESH = Mesh(np.empty((), object), ())


def no_mesh() -> AbstractContextManager[object]:
    """A context in which no mesh is set."""
    return jax.set_mesh(_NO_MESH)

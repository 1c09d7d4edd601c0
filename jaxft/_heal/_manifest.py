"""What a donor says of the state that it keeps: its step, and the shape and dtype of each leaf, as JSON."""

import json
from collections.abc import Sequence

from jaxft._heal._blob import LeafType
from jaxft._heal._frames import BadFrame


def manifest(step: int, leaves: Sequence[LeafType]) -> str:
    return json.dumps({"step": step, "leaves": [[list(leaf.shape), leaf.dtype] for leaf in leaves]})


def read_manifest(said: str) -> tuple[int, list[LeafType]]:
    """Read what a donor has sent. Raises BadFrame if that is anything but a manifest."""
    try:
        found = json.loads(said)
        leaves = [LeafType(tuple(map(int, shape)), str(dtype)) for shape, dtype in found["leaves"]]
        return int(found["step"]), leaves
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise BadFrame(f"its manifest cannot be read ({error!r}): {said[:80]!r}") from error

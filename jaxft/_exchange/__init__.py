"""The all-reduce across groups, over TCP on the host."""

from jaxft._arrays._layout import Layout, LeafSpec
from jaxft._exchange._exchange import exchange_into
from jaxft._exchange._links import Links
from jaxft._exchange._mesh import Peer
from jaxft._exchange._partials import Partials
from jaxft._exchange._patience import Patience
from jaxft._exchange._tree import Node, cover
from jaxft._transport._sockets import Abort

__all__ = [
    "Abort",
    "Layout",
    "LeafSpec",
    "Links",
    "Node",
    "Partials",
    "Patience",
    "Peer",
    "cover",
    "exchange_into",
]

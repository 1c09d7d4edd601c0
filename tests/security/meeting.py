"""Two groups that connect for a quorum, whatever else there is at their ports."""

import threading

from jaxft._exchange import _grid_links
from jaxft._exchange._links import Links, Peer
from jaxft._exchange._patience import Patience
from jaxft._transport._listener import Abort, Listener
from tests import patience


def meet(listeners: list[Listener], members: list[Peer], quorum_id: int) -> None:
    """Let two groups open their links for a quorum, as at a change of membership."""
    made: list[Links] = []

    def open_one(me: int) -> None:
        made.append(
            _grid_links.open_links(
                listeners[me],
                job="job",
                quorum_id=quorum_id,
                me=members[me].group,
                members=members,
                abort=Abort(),
                patience=Patience(patience.FAR_S),
            )
        )

    thread = threading.Thread(target=open_one, args=(1,))
    thread.start()
    open_one(0)
    thread.join()
    assert len(made) == 2
    for links in made:
        links.close()

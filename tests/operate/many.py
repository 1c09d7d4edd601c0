"""A job of many groups that one process simulates, with a real stream each."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks._worker import Worker, workers
from tests.clusters import Cluster

PATIENCE_S = 120.0
# Between two steps: without it, three hundred groups would leave the browser no core.
PAUSE_S = 0.5


@contextmanager
def voting(here: Cluster, groups: int) -> Iterator[None]:
    """Groups that vote twice a second, in the job "rendezvous" of the cluster's coordinator."""
    with workers(Worker("benchmarks._ours.rendezvous")) as (simulated,):
        simulated.ask("join", PATIENCE_S, address=f"localhost:{here.port}", groups=groups)
        ends = threading.Event()
        errors: list[Exception] = []

        def vote() -> None:
            try:
                while not ends.wait(PAUSE_S):
                    simulated.ask("rounds", PATIENCE_S, count=1)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=vote)
        thread.start()
        try:
            yield
        finally:
            ends.set()
            thread.join()
        if errors:
            raise errors[0]

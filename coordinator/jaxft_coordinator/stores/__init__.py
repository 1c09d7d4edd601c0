"""Where a coordinator keeps what must survive a restart, and how it becomes the leader.

One coordinator at a time writes to a `Store`: opening it makes this one the leader, under a term higher than any
before, and from then on no coordinator with a lower term can append. So a coordinator that was frozen, cut off or
replaced finds out at its next decision, before the decision is announced.
"""

from jaxft_coordinator.stores._etcd import EtcdStore
from jaxft_coordinator.stores._file import FileStore
from jaxft_coordinator.stores._store import Opened, Store, StoreDamaged, StoreLost, TimedStore

__all__ = ["EtcdStore", "FileStore", "Opened", "Store", "StoreDamaged", "StoreLost", "TimedStore"]

"""Where a coordinator keeps what it must not forget, and how it comes to lead.

A `Store` is written to by one coordinator at a time: opening it makes this one the leader, under a term that is
higher than any before, and from then on nobody of a lower term can append. So a coordinator that was frozen, cut off
or replaced finds out at its next decision, before anybody hears of it.
"""

from jaxft_coordinator.stores._etcd import EtcdStore
from jaxft_coordinator.stores._file import FileStore
from jaxft_coordinator.stores._store import Opened, Store, StoreDamaged, StoreLost

__all__ = ["EtcdStore", "FileStore", "Opened", "Store", "StoreDamaged", "StoreLost"]

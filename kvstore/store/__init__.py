"""The store: one index over host memory and disk, with leases, stages and pins. See ARCHITECTURE.md."""

from kvstore.store.settings import StoreSettings
from kvstore.store.store import Store, open_store

__all__ = ["Store", "StoreSettings", "open_store"]

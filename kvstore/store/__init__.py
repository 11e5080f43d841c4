"""The store: one index over host memory and disk, with leases, stages and pins. See ARCHITECTURE.md."""

from kvstore.store.codecs import CodecRule
from kvstore.store.settings import Quota, StoreSettings
from kvstore.store.store import Store, open_store

__all__ = ["CodecRule", "Quota", "Store", "StoreSettings", "open_store"]

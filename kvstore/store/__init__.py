"""The store: one index over host memory and disk, with leases, stages and pins. See ARCHITECTURE.md."""

from kvstore.store.codecs import CodecRule
from kvstore.store.opening import open_store
from kvstore.store.settings import Quota, StoreSettings
from kvstore.store.store import Store

__all__ = ["CodecRule", "Quota", "Store", "StoreSettings", "open_store"]

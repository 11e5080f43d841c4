"""Eviction policies by name. A policy is whatever decides the order in which a radix tree gives up blocks.

To add one: teach `kvstore.radix.tree.RadixTree` the order, and enter here a function that makes such a tree. The replay
drives every tree alike (run.py): it matches, touches, stages and places with a tick that counts requests, and takes
victims; it knows nothing of the order itself. So what is measured is what the store would do.
"""

from __future__ import annotations

from kvstore.errors import InvalidArgumentError
from kvstore.radix.tree import POLICIES, RadixTree
from kvstore.store.placement import DiskAdmission
from kvstore.store.settings import StoreSettings

DEFAULT_POLICY = "default"
STORE_POLICY = "survival"


def make_tree(name: str, block_tokens: int) -> RadixTree:
    """A tree with that policy. Keys and hash seed are fixed, so that runs repeat exactly."""
    policy = STORE_POLICY if name == DEFAULT_POLICY else name
    return RadixTree(block_tokens, ns_key=bytes(16), hash_seed=0, policy=policy)


def admission_named(name: str) -> DiskAdmission:
    """What is written to disk; raises InvalidArgumentError that lists the known rules if it is none of them."""
    if name == DEFAULT_POLICY:
        return DiskAdmission(StoreSettings().disk_admission)
    if name not in tuple(DiskAdmission):
        known = ", ".join(sorted((DEFAULT_POLICY, *DiskAdmission)))
        raise InvalidArgumentError(f"no rule of admission is called {name!r}, expected one of {known}")
    return DiskAdmission(name)


def check_policy(name: str) -> None:
    """Raise InvalidArgumentError that lists the known policies if it is none of them."""
    if name not in (DEFAULT_POLICY, *POLICIES):
        known = ", ".join(sorted((DEFAULT_POLICY, *POLICIES)))
        raise InvalidArgumentError(f"no policy is called {name!r}, expected one of {known}")

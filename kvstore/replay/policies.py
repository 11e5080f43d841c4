"""Eviction policies by name. A policy is whatever decides the order in which a radix tree gives up blocks.

To add one: teach `kvstore.radix.tree.RadixTree` the order, and enter here a function that makes such a tree. The replay
drives every tree alike (run.py): it matches, touches, stages and places with a tick that counts requests, and takes
victims; it knows nothing of the order itself. So what is measured is what the store would do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from kvstore.errors import InvalidArgumentError
from kvstore.radix.tree import RadixTree

MakeTree: TypeAlias = Callable[[int], RadixTree]


def _lru(block_tokens: int) -> RadixTree:
    """Least recently used leaf first. Keys and hash seed are fixed, so that runs repeat exactly."""
    return RadixTree(block_tokens, ns_key=bytes(16), hash_seed=0)


DEFAULT_POLICY = "default"
# `default` is what the store uses when nothing is said.
POLICIES: dict[str, MakeTree] = {"lru": _lru, DEFAULT_POLICY: _lru}


def policy(name: str) -> MakeTree:
    """The policy of that name; raises InvalidArgumentError that lists the known ones."""
    if name not in POLICIES:
        raise InvalidArgumentError(f"no policy is called {name!r}, expected one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]

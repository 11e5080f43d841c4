from __future__ import annotations

import pytest

from kvstore.errors import InvalidArgumentError
from kvstore.radix.tree import POLICIES
from kvstore.replay.policies import DEFAULT_POLICY, check_policy, make_tree


@pytest.mark.parametrize("name", [DEFAULT_POLICY, *POLICIES])
def test_a_known_policy_makes_a_tree_of_the_asked_block_size(name):
    check_policy(name)
    assert 32 == make_tree(name, 32).block_tokens


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(InvalidArgumentError, match="'mru', expected one of default, fifo, lfu, lru, s3fifo, sieve"):
        check_policy("mru")

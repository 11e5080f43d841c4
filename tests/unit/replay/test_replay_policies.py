from __future__ import annotations

import pytest

from kvstore.errors import InvalidArgumentError
from kvstore.replay.policies import DEFAULT_POLICY, POLICIES, policy


def test_the_store_s_own_policy_has_a_name():
    assert DEFAULT_POLICY in POLICIES


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_policy_makes_a_tree_of_the_asked_block_size(name):
    assert 32 == policy(name)(32).block_tokens


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(InvalidArgumentError, match="'fifo', expected one of default, lru"):
        policy("fifo")

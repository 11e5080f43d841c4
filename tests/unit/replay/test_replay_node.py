from __future__ import annotations

import numpy as np

from kvstore.replay.node import Found, Node
from kvstore.replay.policies import make_tree


def node(host_blocks: int, disk_blocks: int = 0) -> Node:
    return Node(make_tree("lru", 2), host_blocks=host_blocks, disk_blocks=disk_blocks)


def serve(made: Node, *blocks: int) -> Found:
    """At no time: requests are told apart all the same."""
    return made.serve(prompt(*blocks), 0)


def prompt(*blocks: int) -> np.ndarray:
    return np.repeat(np.array(blocks, dtype=np.uint32), 2)


def test_a_prompt_is_found_again():
    made = node(4)

    assert Found(0, 0) == serve(made, 1, 2, 3)
    assert Found(3, 0) == serve(made, 1, 2, 3)
    assert Found(2, 0) == serve(made, 1, 2, 9)
    assert 2 == Found(1, 1).blocks


def test_a_prompt_larger_than_the_capacity_keeps_its_head():
    made = node(2)

    assert Found(0, 0) == serve(made, 1, 2, 3, 4)
    assert Found(2, 0) == serve(made, 1, 2, 3, 4)
    assert Found(0, 0) == serve(made, 5, 6, 7)
    assert Found(2, 0) == serve(made, 5, 6, 7)


def test_what_leaves_host_memory_is_found_on_disk_and_stays_there_while_host_memory_is_full():
    made = node(2, 4)
    serve(made, 1, 2)
    serve(made, 3, 4)

    assert Found(0, 2) == serve(made, 1, 2)
    assert (2, 0) == (made.demoted_blocks, made.promoted_blocks)


def test_what_is_found_on_disk_moves_up_into_free_room():
    made = node(2, 1)
    serve(made, 4)
    serve(made, 3, 4)
    serve(made, 4, 4)
    serve(made, 1)  # puts 3 on disk in place of 4, and takes 4, 4 from host memory with it

    assert Found(0, 1) == serve(made, 3, 4)
    assert 1 == made.promoted_blocks


def test_a_block_that_has_a_copy_on_disk_is_not_written_again():
    made = node(2, 8)
    for _ in range(2):
        serve(made, 1, 2)
        serve(made, 3, 4)

    assert 2 == made.demoted_blocks


def test_a_disk_that_is_full_gives_up_its_coldest():
    made = node(2, 2)
    serve(made, 1, 2)
    serve(made, 3, 4)
    serve(made, 5, 6)

    assert Found(0, 2) == serve(made, 3, 4)
    assert Found(0, 0) == serve(made, 1, 2)


def test_an_empty_prompt_is_served():
    assert Found(0, 0) == serve(node(1))


def test_a_prompt_worth_less_than_what_is_stored_is_not_stored():
    made = Node(make_tree("survival", 16), host_blocks=24, disk_blocks=0)
    hot = [np.arange(100 * key, 100 * key + 32, dtype=np.uint32) for key in range(8)]
    once = [np.arange(10**6 * key, 10**6 * key + 4096, dtype=np.uint32) for key in range(1, 60)]
    hits = []
    for second, long_prompt in enumerate(once):
        hits.append([made.serve(prompt, second).blocks for prompt in hot])
        assert 0 == made.serve(long_prompt, second + 0.5).blocks

    assert [2] * 8 == hits[-1]

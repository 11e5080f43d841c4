"""What a node tells the directory, turn by turn."""

from __future__ import annotations

from kvstore.cluster.announcer import Announcer, AnnounceSettings
from kvstore.cluster.directory import NodeProfile
from kvstore.cluster.memory_directory import MemoryDirectory, SharedDirectory
from kvstore.nodes import NodeState
from kvstore.store import open_store
from kvstore.testing.blocks import store_prompt
from kvstore.testing.manual_clock import ManualClock
from kvstore.types import KvLayout, Namespace

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=16, dtype="int8", block_tokens=4)
NAMESPACE = Namespace(model="m", revision="r", layout=LAYOUT)


def test_a_node_that_drains_says_so_at_once_and_tells_on_what_it_holds():
    clock = ManualClock()
    shared = SharedDirectory(clock)
    directory = MemoryDirectory(shared)
    settings = AnnounceSettings(announce_tokens=8, announce_after_seconds=0.0)
    with open_store(None, host_bytes=4 << 20) as store:
        announcer = Announcer(store, directory, settings=settings, clock=clock)
        announcer.enter(NodeProfile("a", b"identity", ("127.0.0.1:1",)))
        store_prompt(store, NAMESPACE, range(8))
        announcer.turn()
        announcer.drain()
        store_prompt(store, NAMESPACE, range(100, 108))
        announcer.turn()
        told, new = (store.block_keys(NAMESPACE, tokens)[1] for tokens in (range(8), range(100, 108)))
        assert [1, 1] == [len(holders) for holders in directory.holders([told, new])]
        assert [("a", NodeState.DRAINING)] == [(node.name, node.state) for node in directory.nodes()]
        announcer.undrain()
        announcer.turn()
        assert [NodeState.READY] == [node.state for node in directory.nodes()]
        announcer.stop()

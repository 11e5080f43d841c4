"""The blocks that one engine holds in its device's memory, by keys of ours.

An engine names blocks by hashes of its own, which nobody else can compute. Its events carry token ids and the hash of
the block before, so each block gets a key of ours, chained from its root as block keys are, but over the engine's own
block size and under a secret of this process: these keys stand in no file and no message. A prompt is looked up by its
tokens in steps of the engine's blocks, whatever the block size of the namespace.

    engine's hash --> key            as events name blocks
    key           --> engine's hashes that stand for it, as prompts name them

What is here is a hint for routers. It protects nothing and promises no bytes.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from kvstore.engine_events.messages import AllBlocksCleared, BlockStored
from kvstore.hashing import block_keys, root_key, split_keys
from kvstore.layer_groups import FIELD_BYTES_MAX
from kvstore.tokens import as_token_array
from kvstore.types import Root

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.engine_events.messages import BlockRemoved, EngineEvent, EngineHash

BLOCK_BYTES_MAX = 400  # of one block in both tables, with a hash of 32 bytes just when the tables have grown
_DEVICE_MEDIA = (None, "GPU")


class Outcome(enum.StrEnum):
    """What came of an event, or of a batch."""

    APPLIED = "applied"
    OTHER_MEDIUM = "other_medium"  # not in the device's memory
    OTHER_GROUP = "other_group"  # of another layer group than the first one seen
    UNKNOWN_PARENT = "unknown_parent"  # the block before is not here
    UNKNOWN_BLOCK = "unknown_block"  # what was removed is not here
    UNSUPPORTED = "unsupported"  # images, partial blocks, or an adapter that the settings do not name
    FULL = "full"  # some of its blocks were left out: blocks_max
    FOREIGN = "foreign"  # of a type that is not known
    DUPLICATE = "duplicate"  # a batch that was here already
    MALFORMED = "malformed"  # a batch that cannot be read
    GAP = "gap"  # batches were missed and asked for again
    LOST = "lost"  # batches were missed for good: what was held is forgotten
    RESTART = "restart"  # the engine began anew: likewise


class EngineResidency:
    """What one engine holds. One thread applies events; any may ask, and sees each block before or after one event."""

    def __init__(self, secret: bytes, adapters: Mapping[str, str], blocks_max: int) -> None:
        self._secret = secret
        self._adapters = dict(adapters)
        self._blocks_max = blocks_max
        self._keys: dict[EngineHash, bytes] = {}
        self._copies: dict[EngineHash, int] = {}  # of those that the engine holds more than once
        self._held: dict[bytes, int] = {}
        self._block_tokens = 0  # not known before the first event
        self._group: int | None = None

    @property
    def blocks(self) -> int:
        """Blocks that the engine holds, each once."""
        return len(self._keys)

    @property
    def block_tokens(self) -> int:
        """Tokens of one of them; 0 where that is not known yet."""
        return self._block_tokens

    def clear(self) -> None:
        """Forget everything."""
        self._keys, self._copies, self._held = {}, {}, {}
        self._block_tokens, self._group = 0, None

    def apply(self, event: EngineEvent) -> Outcome:
        """Take one event. O(tokens) of a store, O(blocks) of a removal."""
        if isinstance(event, AllBlocksCleared):
            self.clear()
            return Outcome.APPLIED
        if event.medium not in _DEVICE_MEDIA:
            return Outcome.OTHER_MEDIUM
        if isinstance(event, BlockStored):
            return self._store(event)
        return self._remove(event)

    def leading_blocks(self, keys: list[bytes]) -> int:
        """How many of a prompt's keys, from its beginning on, are held."""
        held = self._held
        return next((number for number, key in enumerate(keys) if key not in held), len(keys))

    def _store(self, event: BlockStored) -> Outcome:
        count = len(event.block_hashes)
        if not self._block_tokens:
            self._block_tokens, self._group = event.block_size, event.group_idx
        if event.group_idx != self._group:
            return Outcome.OTHER_GROUP
        if event.block_size != self._block_tokens or len(event.token_ids) != count * event.block_size:
            return Outcome.UNSUPPORTED
        plain = _plain_blocks(event)
        parent = self._parent_key(event)
        if parent is None or not plain:
            return Outcome.UNKNOWN_PARENT if event.parent_block_hash is not None and plain else Outcome.UNSUPPORTED
        tokens = as_token_array(event.token_ids[: plain * event.block_size])
        keys = split_keys(block_keys(self._secret, parent, tokens, event.block_size))
        for engine_hash, key in zip(event.block_hashes, keys, strict=False):
            if not self._add(engine_hash, key):
                return Outcome.FULL
        return Outcome.APPLIED if plain == count else Outcome.UNSUPPORTED

    def _parent_key(self, event: BlockStored) -> bytes | None:
        """The key before the first block; None where that cannot be said."""
        if event.parent_block_hash is not None:
            return self._keys.get(event.parent_block_hash)
        adapter = None if event.lora_name is None else self._adapters.get(event.lora_name)
        if adapter is None and (event.lora_name is not None or event.lora_id is not None):
            return None
        salts = _texts(event, 0)
        if salts is None or len(salts) > 1:
            return None
        salt = salts[0] if salts else event.cache_salt
        if salt is not None and len(salt.encode(errors="replace")) > FIELD_BYTES_MAX:
            return None
        return root_key(self._secret, Root(adapter=adapter, salt=salt or None))

    def _add(self, engine_hash: EngineHash, key: bytes) -> bool:
        known = self._keys.get(engine_hash)
        if known is not None:
            self._copies[engine_hash] = self._copies.get(engine_hash, 1) + 1
            return True
        if len(self._keys) >= self._blocks_max:
            return False
        self._keys[engine_hash] = key
        self._held[key] = self._held.get(key, 0) + 1
        return True

    def _remove(self, event: BlockRemoved) -> Outcome:
        if self._block_tokens and event.group_idx != self._group:
            return Outcome.OTHER_GROUP
        known = [engine_hash for engine_hash in event.block_hashes if self._take(engine_hash)]
        return Outcome.APPLIED if len(known) == len(event.block_hashes) else Outcome.UNKNOWN_BLOCK

    def _take(self, engine_hash: EngineHash) -> bool:
        """Take one copy of a block away; false where there was none."""
        copies = self._copies.pop(engine_hash, 1)
        if copies > 1:
            if copies > 2:
                self._copies[engine_hash] = copies - 1
            return True
        key = self._keys.pop(engine_hash, None)
        if key is None:
            return False
        others = self._held.pop(key) - 1
        if others:
            self._held[key] = others
        return True


def prompt_keys(secret: bytes, tokens: object, root: Root, block_tokens: int) -> list[bytes]:
    """The keys of a prompt's whole blocks of an engine, as all engines under one secret have them."""
    parent = root_key(secret, Root(adapter=root.adapter, salt=root.salt))  # an engine holds one epoch of weights
    return split_keys(block_keys(secret, parent, as_token_array(tokens), block_tokens))


def _plain_blocks(event: BlockStored) -> int:
    """Leading blocks that depend on nothing but tokens and root: no image, no embedding."""
    if event.extra_keys is None:
        return len(event.block_hashes)
    for number in range(len(event.block_hashes)):
        texts = _texts(event, number)
        is_first = number == 0 and event.parent_block_hash is None
        if texts is None or (texts and not is_first):
            return number
    return len(event.block_hashes)


def _texts(event: BlockStored, number: int) -> list[str] | None:
    """What a block depends on besides its tokens and its adapter, where that is texts alone; else None.

    The first block of a prompt has the cache salt there.
    """
    if event.extra_keys is None:
        return []
    keys = event.extra_keys[number] if number < len(event.extra_keys) else None
    rest = list(keys or ())
    if event.lora_name is not None and rest and rest[0] == event.lora_name:
        del rest[0]
    texts = [key for key in rest if isinstance(key, str)]
    return texts if len(texts) == len(rest) else None

"""How sequence states lie in a pool: what their pieces are called, where their paths are, and which are whole.

Each slot is a *piece*. Those of the blob come first, then, on disk alone, those of the path: token ids as little-endian
u32, the rest of the last piece zeros. The identity in a header is made of

    root_key     of the root
    parent_key   the state's id: 16 random bytes for each time that a state is stored
    tokens       eight u32: format (1), number of the piece, pieces of the blob, pieces of the path, bytes of the blob
                 (low, high), tokens of the path, 0
    key          SipHash-2-4-128 of id and these numbers, keyed by the namespace's key, as of a block

so no piece is taken for another, of another state, or of the same prompt stored another time. A state is there if all
its pieces are; the path is written last.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore import hashing
from kvstore.store.states import StoredState
from kvstore.tiers.base import BlockIdentity
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from kvstore.tiers.base import RecoveredBlock
    from kvstore.tiers.persistent import PersistentPool

PIECE_NUMBERS = 8
_FORMAT = 1
_ID_BYTES = 16
_TOKEN_BYTES = 4
_WORD = 2**32


class _Numbers(NamedTuple):
    """What the header of a piece says."""

    number: int
    pieces: int
    path_pieces: int
    size_bytes: int
    path_tokens: int

    @property
    def whole(self) -> tuple[int, ...]:
        """What all pieces of a state say alike."""
        return self[1:]


class StateRecords:
    """Of one namespace. Needs no lock."""

    def __init__(self, ns_key: bytes, piece_bytes: int) -> None:
        self.piece_bytes = piece_bytes
        self._ns_key = ns_key

    def make(self, root_key: bytes, path: bytes, size_bytes: int, tick: int) -> StoredState:
        """A new state, which lies nowhere yet."""
        return self._state(secrets.token_bytes(_ID_BYTES), root_key, path, size_bytes, tick)

    def pieces(self, state: StoredState) -> int:
        """Pieces of its blob."""
        return self.pieces_of(state.size_bytes)

    def pieces_of(self, size_bytes: int) -> int:
        """Pieces of so many bytes."""
        return -(-size_bytes // self.piece_bytes)

    def path_pieces(self, state: StoredState) -> int:
        """Pieces of its path."""
        return self.pieces_of(len(state.path))

    def path_rows(self, state: StoredState) -> NDArray[np.uint8]:
        """The pieces of its path."""
        rows = np.zeros((self.path_pieces(state), self.piece_bytes), dtype=np.uint8)
        rows.reshape(-1)[: len(state.path)] = np.frombuffer(_swapped(state.path), dtype=np.uint8)
        return rows

    def identities(self, state: StoredState, pieces: range) -> list[BlockIdentity]:
        """Of some of its pieces, those of the path counted on behind those of the blob."""
        whole = (self.pieces(state), self.path_pieces(state), state.size_bytes, state.tokens)
        return [
            self._identity(state.root_key, state.state_id, _Numbers(piece, *whole), state.writer) for piece in pieces
        ]

    def recover(
        self, recovered: Iterable[RecoveredBlock], disk: PersistentPool, tick: int
    ) -> tuple[list[StoredState], list[int]]:
        """The states that a disk holds whole, and the slots of all that is left over."""
        found: defaultdict[tuple[bytes, bytes, tuple[int, ...]], dict[int, int]] = defaultdict(dict)
        writers: dict[bytes, int] = {}
        left_over = []
        for block in recovered:
            numbers = self._numbers(block.identity)
            if numbers is None:
                left_over.append(block.slot)
            else:
                identity = block.identity
                writers[identity.parent_key] = identity.writer
                found[identity.root_key, identity.parent_key, numbers.whole][numbers.number] = block.slot
        states = []
        for (root_key, state_id, whole), slots in found.items():
            state = self._recovered(root_key, state_id, _Numbers(0, *whole), slots, disk)
            if state is None:
                left_over += slots.values()
            else:
                state.stored_at = state.used_at = tick
                state.writer = writers[state_id]
                states.append(state)
        return states, left_over

    def _recovered(
        self, root_key: bytes, state_id: bytes, numbers: _Numbers, slots: dict[int, int], disk: PersistentPool
    ) -> StoredState | None:
        """One state, if all its pieces are there and its path is as it was written."""
        count = numbers.pieces + numbers.path_pieces
        if len(slots) != count:
            return None
        in_order = np.array([slots[piece] for piece in range(count)], dtype=np.uint32)
        rows = np.empty((numbers.path_pieces, self.piece_bytes), dtype=np.uint8)
        identities = [
            self._identity(root_key, state_id, numbers._replace(number=piece)) for piece in range(numbers.pieces, count)
        ]
        if not disk.read(in_order[numbers.pieces :], identities, rows).all():
            return None
        path = _swapped(rows.reshape(-1)[: numbers.path_tokens * _TOKEN_BYTES].tobytes())
        state = self._state(state_id, root_key, path, numbers.size_bytes, 0)
        state.slots[Tier.DISK] = in_order
        return state

    def _state(self, state_id: bytes, root_key: bytes, path: bytes, size_bytes: int, tick: int) -> StoredState:
        tokens = np.frombuffer(path, dtype=">u4").astype(np.uint32)
        key = hashing.block_keys(self._ns_key, root_key, tokens, 1)[-1].tobytes()
        return StoredState(state_id, root_key, path, key, size_bytes, tick, tick)

    def _identity(self, root_key: bytes, state_id: bytes, numbers: _Numbers, writer: int = 0) -> BlockIdentity:
        words = _packed(numbers)
        key = hashing.block_keys(self._ns_key, state_id, words, PIECE_NUMBERS).tobytes()
        return BlockIdentity(root_key, state_id, key, words.tobytes(), writer)

    def _numbers(self, identity: BlockIdentity) -> _Numbers | None:
        """What a header says; None where that makes no sense, or is not of this namespace."""
        words = np.frombuffer(identity.tokens, dtype="<u4")
        if words.size != PIECE_NUMBERS or words[0] != _FORMAT:
            return None
        _, number, pieces, path_pieces, low, high, path_tokens, _ = (int(word) for word in words)
        numbers = _Numbers(number, pieces, path_pieces, low + high * _WORD, path_tokens)
        is_sound = (
            self.pieces_of(numbers.size_bytes) == pieces > 0
            and self.pieces_of(path_tokens * _TOKEN_BYTES) == path_pieces > 0
            and number < pieces + path_pieces
        )
        if not is_sound or self._identity(identity.root_key, identity.parent_key, numbers) != identity:
            return None
        return numbers


def _packed(numbers: _Numbers) -> NDArray[np.uint32]:
    high, low = divmod(numbers.size_bytes, _WORD)
    words = (_FORMAT, numbers.number, numbers.pieces, numbers.path_pieces, low, high, numbers.path_tokens, 0)
    return np.array(words, dtype="<u4")


def _swapped(path: bytes) -> bytes:
    """Token ids in the other order of bytes."""
    return np.frombuffer(path, dtype=np.uint32).byteswap().tobytes()

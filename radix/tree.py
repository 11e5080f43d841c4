"""The typed face of the native radix tree: which blocks exist for a prefix, in which tier, and who goes first."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from kvstore.radix._core import _native
from kvstore.types import Tier

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvstore.types import BlockIds, Slots, TokenArray

NO_SLOT = _native.NO_SLOT
NO_BLOCK = _native.NO_BLOCK
SLICE_BLOCKS = _native.SLICE_BLOCKS
EDGE_BLOCKS = _native.EDGE_BLOCKS
POLICIES = tuple(_native.POLICIES)
TICK_MAX = _native.TICK_MAX
# The depth at which attention costs as much as all else that a token takes, to `survival_flops`.
EVEN_TOKENS = _native.EVEN_TOKENS
TIERS = (Tier.HOST, Tier.DISK)
_TIER_INDEX = {tier: index for index, tier in enumerate(TIERS)}


class Removed:
    """What a call took out of the tree. The caller owns the slots from now on and gives them back to their tier."""

    __slots__ = ("_native",)

    def __init__(self, native: _native.Removed) -> None:
        self._native = native

    @property
    def blocks(self) -> int:
        """Blocks that left the tree for good, staged ones and those that a lease still keeps readable included."""
        return self._native.blocks

    @property
    def kept(self) -> int:
        """Blocks that `evict` was asked for and left where they are."""
        return self._native.kept

    @property
    def resume(self) -> tuple[int, int] | None:
        """Where `drop_unheld` goes on; None where it is done."""
        return self._native.resume

    @property
    def displaced_keys(self) -> NDArray[np.uint8]:
        """Keys of the blocks that left the evicted tier and stay in another, shape [blocks, 16]."""
        return self._native.displaced_keys

    @property
    def dropped_keys(self) -> NDArray[np.uint8]:
        """Keys of the committed blocks that left the tree, ancestors first, shape [blocks, 16]."""
        return self._native.dropped_keys

    def slots(self, tier: Tier) -> Slots:
        """Slots of `tier` that no block refers to any more."""
        return self._native.slots(_index_of(tier))


class RadixTree:
    """A compressed radix tree over the token ids of one namespace, with a root for each 16-byte root key.

    Blocks are named by uint32 ids, which stay the same until the block is freed and are reused afterwards. All token
    and id arguments are flat uint32 arrays (strided ones are copied); results are fresh arrays.

    A block is *staged* while it has no slot in any tier, and invisible to `match`. It is *in use* while it is leased,
    or taken as a victim and not yet evicted. Removed while in use it becomes *detached*: unreachable, with its id,
    slots, keys and tokens as they were until its last user lets go.

    The work of one call is bounded: a slice of SLICE_BLOCKS blocks, the blocks or ids that it was given, and
    EDGE_BLOCKS for each node in which one of those ids lies. So what is dropped or cleared can be *condemned* at first:
    out of reach as if it were detached (no match, no victim, no place), it waits for calls of `reap`, which return its
    slots and keys.

    Callers lease, release and touch prefixes only, so holds and ticks never grow from the root towards a leaf.

    The caller's lock covers every call but `match` and `removals`, which may run beside all others. Ids of a match
    made without the lock may be gone, and reused, by the time it is taken: use them only if `removals` is what it was
    before the match, else match again under the lock. Malformed arguments and ids that are unknown or freed raise
    ValueError before anything changes. The GIL is released where more than about 200 us of work are expected, and
    where `match` would wait for another call.
    """

    __slots__ = ("_native",)

    def __init__(
        self,
        block_tokens: int,
        *,
        ns_key: bytes,
        hash_seed: int,
        policy: str = "lru",
        hash_bits: int = 32,
        slice_blocks: int = SLICE_BLOCKS,
        edge_blocks: int = EDGE_BLOCKS,
    ) -> None:
        """Block keys are made with the 16-byte `ns_key`; `hash_seed` is 64 random bits of this process.

        `policy`, one of POLICIES, decides what leaves a tier first.

        For tests, fewer `hash_bits` force hash collisions, fewer `slice_blocks` and `edge_blocks` more slices and
        nodes.
        """
        self._native = _native.RadixTree(block_tokens, ns_key, hash_seed, hash_bits, policy, slice_blocks, edge_blocks)

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""
        return self._native.block_tokens

    @property
    def block_count(self) -> int:
        """Blocks in the tree, staged and condemned ones included, detached ones not."""
        return self._native.block_count

    @property
    def node_count(self) -> int:
        """Runs of blocks without a branch, long ones in several nodes; roots are not counted."""
        return self._native.node_count

    @property
    def root_count(self) -> int:
        """Roots that have at least one block."""
        return self._native.root_count

    @property
    def memory_bytes(self) -> int:
        """Bytes that the index itself occupies. O(blocks / 1024)."""
        return self._native.memory_bytes

    @property
    def policy_name(self) -> str:
        """The eviction policy, one of POLICIES."""
        return self._native.policy_name

    @property
    def policy_bytes(self) -> int:
        """Bytes of what the eviction policy has learnt, and remembers of blocks that left. Bounded."""
        return self._native.policy_bytes

    @property
    def removals(self) -> int:
        """Grows whenever blocks leave the tree: equal before a `match` and now, its ids still name what it found."""
        return self._native.removals

    @property
    def condemned(self) -> bool:
        """Whether blocks that were dropped wait for `reap`."""
        return self._native.condemned

    @property
    def steps(self) -> int:
        """Blocks that calls have visited, those of `check_integrity` aside: what tests bound.

        A match counts the blocks that it found and each node that it compared with.
        """
        return self._native.steps

    def tier_blocks(self, tier: Tier) -> int:
        """Blocks in the tree that have a slot in `tier`."""
        return self._native.tier_blocks(_index_of(tier))

    def match(self, root: bytes, tokens: TokenArray) -> BlockIds:
        """Ids of the longest prefix of `tokens` whose blocks are all committed. Protects nothing. O(tokens)."""
        return self._native.match(root, tokens)

    def touch(self, ids: BlockIds, tick: int, prompt_blocks: int | None = None) -> None:
        """Tell the eviction policy that a request used these blocks.

        `tick` is the time in microseconds of some clock, below 2^48 and another one for each request, and
        `prompt_blocks` the whole blocks of the request's prompt, which are at least `ids.size`, the default.
        """
        self._native.touch(ids, tick, ids.size if prompt_blocks is None else prompt_blocks)

    def hint_next_use(self, block_id: int, tick: int, seconds: float | None) -> int:
        """Tell the policy when the prompt that ends with this block will be used again; None says never.

        It is told of the blocks that this prompt and what was appended to it do not share with others; returns how
        many these are. Raises ValueError for `seconds` below 0.
        """
        return self._native.hint_next_use(block_id, tick, seconds)

    def slots(self, ids: BlockIds, tier: Tier) -> Slots:
        """The slot of each block in `tier`, NO_SLOT where it has none."""
        return self._native.slots(ids, _index_of(tier))

    def leading(self, ids: BlockIds, tier: Tier) -> int:
        """How many of the first blocks have a slot in `tier`."""
        return self._native.leading(ids, _index_of(tier))

    def lease(self, ids: BlockIds) -> None:
        """Add one hold to each block: it is not evicted and keeps its slots until the hold is released.

        Raises ValueError where a block has 2^18 - 1 holds already.
        """
        self._native.lease(ids)

    def release(self, ids: BlockIds) -> Removed:
        """Take one hold from each block.

        Staged blocks that nobody holds any more vanish with all that lies below them; detached ones give up their
        slots. Raises ValueError where a block is not held that often.
        """
        return Removed(self._native.release(ids))

    def stage(self, root: bytes, tokens: TokenArray, from_block: int, tick: int) -> tuple[int, BlockIds]:
        """Make room in the tree for the whole blocks of `tokens`: (blocks already there, ids of all of them).

        What is missing is added as staged blocks. Each block of the path is leased once; the caller later releases the
        ids. For the policy the path's blocks are in use at `tick`; the request counts where it touches them. Where
        fewer than `from_block` blocks are there, the ids are empty and nothing changes. Staged blocks of others count
        as there.
        """
        return self._native.stage(root, tokens, from_block, tick)

    def place(self, ids: BlockIds, tier: Tier, slots: Slots) -> NDArray[np.bool_]:
        """Give each block its slot in `tier`; a staged block is committed by it.

        False, with the slot left to the caller, where the block is detached or has a slot in `tier` already.
        """
        return self._native.place(ids, _index_of(tier), slots)

    def victim_value(self, tier: Tier, tick: int) -> float | None:
        """What the block that `take_victims` would return first is worth; None if there is none.

        The policy's own measure, comparable between trees of one policy at one tick: the lowest goes first.
        """
        return self._native.victim_value(_index_of(tier), tick)

    def rehearsed(self, tier: Tier) -> tuple[float, float, list[tuple[int, float]]]:
        """What other capacities of `tier` would have found: (looked up, found, [(capacity, found with it)]), in blocks.

        Found is what was in `tier` or in one before it. Counted since `tier` was full; the list is empty until then,
        and for policies that do not rehearse. The capacities are a quarter, a half, one, two and four times its own.
        """
        return self._native.rehearsed(_index_of(tier))

    def value_of(self, block_id: int, tick: int) -> float:
        """What a block in the tree is worth; see `victim_value`. 0 for one that was removed."""
        return self._native.value_of(block_id, tick)

    def values(self, ids: BlockIds, tick: int) -> NDArray[np.float64]:
        """What each block is worth: `value_of` for many."""
        return self._native.values(ids, tick)

    def uses(self, ids: BlockIds) -> NDArray[np.uint16]:
        """How many requests used each block, as far as it is remembered; 0 where the policy does not count them."""
        return self._native.uses(ids)

    def carries(self, ids: BlockIds, tier: Tier) -> NDArray[np.bool_]:
        """Whether some block below each one lies in `tier`, victims of it not counted."""
        return self._native.carries(ids, _index_of(tier))

    def parents(self, ids: BlockIds) -> BlockIds:
        """The id of the block above each one, NO_BLOCK where it is the first of its prompt."""
        return self._native.parents(ids)

    def take_victims(self, tier: Tier, limit: int, worth: float = inf) -> BlockIds:
        """Take up to `limit` blocks that may leave `tier`, in the order of the policy.

        Ends at the first one that is worth more than `worth`: what the blocks are worth for which room is made.

        A block may leave when it is unheld and nothing below it is in the tier, victims taken before it not counted.
        Blocks of one history go together, from the last one up; among equals of the policy the lowest slot goes first.
        Taken blocks stay readable and in use until `evict` is called for them, which the caller must do.
        """
        return self._native.take_victims(_index_of(tier), limit, worth)

    def take_range(
        self, tier: Tier, first_slot: int, slot_count: int, first_id: int = 0
    ) -> tuple[BlockIds, int | None]:
        """Take unheld blocks whose slot in `tier` lies in the range, whatever lies below them, deepest first.

        For emptying an extent. As with `take_victims`, `evict` must follow. Looks at SLICE_BLOCKS blocks from id
        `first_id` on; the second value is the id to go on with, None when all blocks were looked at.
        """
        return self._native.take_range(_index_of(tier), first_slot, slot_count, first_id)

    def evict(self, ids: BlockIds, tier: Tier) -> Removed:
        """End the eviction of victims of `tier`.

        A victim that was leased meanwhile stays and is counted in `kept`, as is a block that is no victim. One with a
        slot in another tier leaves `tier` alone; a last copy is removed with all that lies below it. A detached
        victim that nobody else uses gives up its slots.
        """
        return Removed(self._native.evict(ids, _index_of(tier)))

    def drop(self, ids: BlockIds) -> Removed:
        """Remove these blocks and all that lies below them, whoever holds them; blocks in use become detached."""
        return Removed(self._native.drop(ids))

    def drop_unheld(
        self, root: bytes, tokens: TokenArray, from_block: int, resume: tuple[int, int] | None = None
    ) -> Removed:
        """Remove block `from_block` of this prompt and all that lies below it, except blocks that are held.

        Call it again with the `resume` of what it returned until that is None. Where other calls removed blocks
        meanwhile it begins anew, which drops nothing that it would not have dropped.
        """
        return Removed(self._native.drop_unheld(root, tokens, from_block, resume))

    def clear(self) -> Removed:
        """Remove all blocks of all roots; blocks in use become detached."""
        return Removed(self._native.clear())

    def reap(self) -> Removed:
        """Free a slice of what is condemned; blocks in use become detached.

        A prompt that is staged again before its condemned blocks are reaped has their keys a second time, so callers
        who publish keys reap first.
        """
        return Removed(self._native.reap())

    def missing_in(self, tier: Tier, source_tier: Tier, first_id: int = 0) -> tuple[BlockIds, int | None]:
        """Blocks that are in `source_tier` and not in `tier`, each after all such ancestors.

        Looks at SLICE_BLOCKS blocks from id `first_id` on, and at the ancestors of those it found; the second value is
        the id to go on with, None when all blocks were looked at. What is still missing may be named in each slice.
        """
        return self._native.missing_in(_index_of(tier), _index_of(source_tier), first_id)

    def boundaries(self, every: int, first_id: int = 0) -> tuple[BlockIds, int | None]:
        """Committed blocks whose end is a multiple of `every` blocks of their prefix.

        Looks at SLICE_BLOCKS blocks from id `first_id` on; the second value is the id to go on with, None when all
        blocks were looked at.
        """
        return self._native.boundaries(every, first_id)

    def prepare_keys(self, ids: BlockIds) -> bool:
        """Make a slice of the keys above these blocks, which `keys` and `evict` need; false where there are more."""
        return self._native.prepare_keys(ids)

    def keys(self, ids: BlockIds) -> NDArray[np.uint8]:
        """Block keys, shape [ids, 2, 16]: the parent's and its own.

        The key at the end of each node is kept, and one for each 32 blocks of nodes whose keys were asked for. So the
        cost is that of the blocks concerned, once the keys of their prefix were made: see `prepare_keys`.
        """
        return self._native.keys(ids)

    def tokens(self, ids: BlockIds) -> NDArray[np.uint32]:
        """Token ids of each block, shape [ids, block_tokens]."""
        return self._native.tokens(ids)

    def root_of(self, block_id: int) -> bytes:
        """Root key of the prefix that the block belongs to."""
        return self._native.root_of(block_id)

    def save_tables(self, first: int = 0) -> tuple[bytes, int | None]:
        """A slice of what the policy has learnt, from `first` on; then where to go on, None where that was all.

        The slices joined are what `restore` takes. The tree may change between them: of what changes it is open how
        much is saved.
        """
        return self._native.save_tables(first)

    def save_runs(self, tier: Tier, first: int = 0) -> tuple[bytes, int | None]:
        """The same of the histories of the runs that have their first block in `tier`; 40 bytes each.

        Makes the keys of those blocks: O(blocks above them) hashes in all slices together.
        """
        return self._native.save_runs(_index_of(tier), first)

    def save_ghosts(self, first: int = 0) -> tuple[bytes, int | None]:
        """The same of the histories of blocks that left, which mean something to trees of one `hash_seed` only."""
        return self._native.save_ghosts(first)

    def restore(self, tables: bytes, runs: bytes, ghosts: bytes, *, shift: int, tick: int) -> None:
        """Give the policy back what it knew, after the blocks of which it was saved were staged and placed again.

        `shift` is added to the saved ticks. Blocks that were not saved are as new at `tick`; saved ones that are not
        in the tree are forgotten. Raises ValueError, with nothing changed, for bytes that a tree of this policy did
        not save. Not in slices: for a tree that nobody else uses yet. O(blocks + runs), one hash for each block.
        """
        self._native.restore(tables, runs, ghosts, shift, tick)

    def check_integrity(self) -> list[str]:
        """A sentence for each invariant that does not hold, the first hundred; empty when all is well.

        O(all blocks), of which those whose keys were made are hashed. Takes any damage: a broken tree gives problems,
        not a crash.
        """
        return self._native.check_integrity()

    def check_slice(self) -> list[str] | None:
        """Check a slice of all invariants: None while there is more, at the end what `check_integrity` would say.

        Other calls may come between the slices, and nothing that they do is taken for damage. What was checked by then
        is not looked at again, so damage done meanwhile may be found only the next time. After the end it begins anew.
        """
        return self._native.check_slice()


def _index_of(tier: Tier) -> int:
    index = _TIER_INDEX.get(tier)
    if index is None:
        raise ValueError(f"tier is {tier!r}, expected one of {', '.join(known.name for known in TIERS)}")
    return index

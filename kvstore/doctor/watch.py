"""Hands lookups of a store to the doctor."""

from __future__ import annotations

import functools
import secrets
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING

from kvstore.doctor.doctor import PROMPT_TOKENS_MAX
from kvstore.doctor.seen import Home, SeenLookup
from kvstore.types import PLAIN_ROOT, Symbols

if TYPE_CHECKING:
    from kvstore.doctor.doctor import Doctor
    from kvstore.types import Namespace, PrefixMatch, Root

_NAMESPACES_MAX = 1024
_DIGEST_BYTES = 16


class LookupWatch:
    """An observer of lookups for Store.observe_lookups. Any thread may call.

    Lookups of digests and of sequence states are left out: the former are no tokens, and the latter have no blocks. Of
    what a root adds, salts for one, nothing is kept but a digest under a key of this process.
    """

    def __init__(self, doctor: Doctor) -> None:
        self._doctor = doctor
        self._key = secrets.token_bytes(_DIGEST_BYTES)
        self._layout = functools.lru_cache(_NAMESPACES_MAX)(self._layout_digest)

    def see(self, match: PrefixMatch) -> None:
        """Tell the doctor of it. The prompt is the match's own copy, and nobody changes it.

        O(1), but for prompts above PROMPT_TOKENS_MAX, whose head is copied so that the rest need not be kept.
        """
        layout = match.namespace.layout
        if layout.state is None and layout.symbols == Symbols.TOKENS:
            if match.prompt.size > PROMPT_TOKENS_MAX:
                match = replace(match, prompt=match.prompt[:PROMPT_TOKENS_MAX].copy())
            self._doctor.look(functools.partial(self._seen, match))

    def _seen(self, match: PrefixMatch) -> SeenLookup:
        namespace = match.namespace
        home = Home(
            namespace.tenant,
            namespace.model,
            namespace.revision,
            self._layout(namespace),
            self._root_digest(match.root),
        )
        return SeenLookup(home, match.prompt, match.tokens, namespace.layout.block_tokens)

    def _layout_digest(self, namespace: Namespace) -> str:
        """Of all that keeps namespaces apart beside their names."""
        return self._digest(repr((namespace.layout, namespace.secret)))

    def _root_digest(self, root: Root) -> str:
        return "" if root == PLAIN_ROOT else self._digest(repr((root.adapter, root.salt, root.weights_epoch)))

    def _digest(self, text: str) -> str:
        return blake2b(text.encode(), key=self._key, digest_size=_DIGEST_BYTES).hexdigest()

"""What prefilling costs, by the formula that `survival_flops` weighs hits with (kvstore/radix/csrc/survival.h).

A token at depth d costs 1 + d / EVEN_TOKENS, in units of what one takes without attention: all else is the same for
every token, attention grows with what lies before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.radix.tree import EVEN_TOKENS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def prefill_costs(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """What it costs to compute the first so many tokens of a prompt."""
    return tokens * (1 + tokens / (2 * EVEN_TOKENS))

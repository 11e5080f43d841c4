from __future__ import annotations

import pytest

from kvstore.errors import ConfigError
from kvstore.tokens import PROMPT_TOKENS_MAX
from kvstore.transport.limits import ServiceLimits


@pytest.mark.parametrize("value", [0, -1, True, "1", None, 2**70])
def test_a_limit_out_of_range_is_refused_by_name(value: object):
    with pytest.raises(ConfigError, match="sessions"):
        ServiceLimits(sessions=value)


def test_a_frame_must_fit_into_a_message():
    with pytest.raises(ConfigError, match="frame_bytes"):
        ServiceLimits(frame_bytes=2**20, message_bytes=2**20)


def test_the_longest_prompt_fits_into_a_message():
    assert ServiceLimits().message_bytes > 4 * PROMPT_TOKENS_MAX + 4096

"""The metrics page of a sidecar, read by commands."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections import defaultdict

from kvstore.errors import UnavailableError
from kvstore.metrics import CALL_SECONDS, CALL_SECONDS_BUCKETS

_SECONDS_MAX = 5.0
_PAGE_BYTES_MAX = 16 << 20
_BUCKET = re.compile(
    rf'{CALL_SECONDS}_bucket{{(?=[^}}]*method="(?P<method>[^"]*)")[^}}]*le="(?P<bound>[^"]*)"[^}}]*}} (?P<count>\S+)'
)


def read_metrics(address: str) -> str:
    """The page at HOST:PORT, in Prometheus' text format; raises UnavailableError."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=_SECONDS_MAX) as response:
            page: bytes = response.read(_PAGE_BYTES_MAX)
    except (OSError, ValueError) as err:
        reason = err.reason if isinstance(err, urllib.error.URLError) else err
        raise UnavailableError(f"no metrics at {address}: {reason}; give what `kvstore serve --metrics` has") from err
    return page.decode(errors="replace")


def calls_of(page: str) -> dict[str, list[int]]:
    """Of each method its calls by bucket of duration, the last one without a bound."""
    reached: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(CALL_SECONDS_BUCKETS) + 1))
    places = {str(bound): place for place, bound in enumerate([*CALL_SECONDS_BUCKETS, "+Inf"])}
    for found in _BUCKET.finditer(page):
        if found["bound"] in places:
            reached[found["method"]][places[found["bound"]]] += int(float(found["count"]))
    return {
        method: [count - below for count, below in zip(counts, [0, *counts], strict=False)]
        for method, counts in reached.items()
    }

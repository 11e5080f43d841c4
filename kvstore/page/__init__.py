"""The node's own page: what the hit rate is, over time and by tier, and what would raise it. See README.md."""

from kvstore.page.prefixes import HotPrefixes
from kvstore.page.sources import PageSources, ShownPrefix
from kvstore.page.wsgi import PATHS, NodePage

__all__ = ["PATHS", "HotPrefixes", "NodePage", "PageSources", "ShownPrefix"]

"""Dashboards for Grafana, and rules for Prometheus, that go with the metrics. See README.md."""

from kvstore.dashboards.boards import BOARDS
from kvstore.dashboards.export import export

__all__ = ["BOARDS", "export"]

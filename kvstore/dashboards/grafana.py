"""Dashboards as the JSON that Grafana reads: schema 39, its classic form, which 10 and later take.

https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/
"""

from __future__ import annotations

from typing import Any

from kvstore.dashboards.panels import Board, Form, Panel, Query

_SCHEMA_VERSION = 39
_WIDTH = 12  # of 24
_HEIGHT = 8
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def as_json(board: Board) -> dict[str, Any]:
    """One dashboard; it asks for its data source, and for the nodes to show."""
    return {
        "uid": board.uid,
        "title": board.title,
        "tags": ["kvstore"],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_source_choice(), _node_choice()]},
        "panels": [_panel(number, panel) for number, panel in enumerate(board.panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    column, row = number % 2, number // 2
    return {
        "id": number + 1,
        "type": panel.form.value,
        "title": panel.question,
        "description": panel.advice,
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "targets": [_target(chr(ord("A") + at), query) for at, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": {},
    }


def _target(reference: str, query: Query) -> dict[str, Any]:
    return {"refId": reference, "expr": query.expression, "legendFormat": query.legend, "datasource": _SOURCE}


def _defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit.value, "min": 0}
    if panel.form is Form.LINES:
        mode = "normal" if panel.stacked else "none"
        filling = 40 if panel.stacked else 0
        defaults["custom"] = {"stacking": {"mode": mode, "group": "A"}, "fillOpacity": filling, "showPoints": "never"}
    return defaults


def _source_choice() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _node_choice() -> dict[str, Any]:
    return {
        "name": "instance",
        "type": "query",
        "label": "Node",
        "datasource": _SOURCE,
        "query": {"query": "label_values(kvstore_build_info, instance)", "refId": "nodes"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }

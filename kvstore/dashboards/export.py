"""Writes dashboards, their provisioning, and rules into a folder that Grafana and Prometheus read."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from kvstore.dashboards.boards import BOARDS
from kvstore.dashboards.grafana import as_json
from kvstore.errors import ConfigError

RULES = "prometheus-rules.yaml"
PROVISIONING = "grafana-provisioning.yaml"


def export(folder: Path) -> list[Path]:
    """The files that were written; what is there by their names is replaced, and nothing else is touched.

    Raises ConfigError where the folder cannot be made or written.
    """
    texts = {f"{board.uid}.json": json.dumps(as_json(board), indent=1) + "\n" for board in BOARDS}
    texts |= {name: (files("kvstore.dashboards") / name).read_text(encoding="utf-8") for name in (RULES, PROVISIONING)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as err:
        raise ConfigError(f"{folder} cannot be written: {err.strerror}; name a folder of yours") from err
    return [folder / name for name in texts]

"""What the sidecar writes on stderr: one line an event, as text for people or JSON for machines."""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.insight_config import LogConfig


class TextFormatter(logging.Formatter):
    """`2026-11-30T07:39:25.123Z INFO kvstore.server serving: ...`; a stack trace follows on lines of its own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802  # logging's name
        """UTC with milliseconds."""
        when = time.strftime(datefmt or "%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"{when}.{int(record.msecs):03d}Z"


class JsonFormatter(TextFormatter):
    """One JSON object a line: time, level, logger, message and, for a fault of ours, trace."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        row = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            row["trace"] = self.formatException(record.exc_info)
        return json.dumps(row)


def log_to_stderr(config: LogConfig) -> None:
    """Send our log, and warnings of the libraries below, to stderr. For processes that are ours alone."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("kvstore").setLevel(config.level.upper())

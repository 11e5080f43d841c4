"""Writes docs/support.md from what the tests recorded and what no test can tell.

python docs/make_support.py
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
HEAD = """# Which engines work

Written by `python docs/make_support.py` from what the tests ran: each line of a table is a test that passed, where it
compared the engine's answers with and without kvstore. `kvstore check ENGINE` tells whether yours will work.
"""


def render(recorded: dict[str, Any], described: dict[str, Any]) -> str:
    """The whole document."""
    overview = ["| engine | versions tested | layouts |", "|---|---|---|"]
    sections = []
    for engine, known in described.items():
        rows = recorded[engine]["rows"]
        layouts = sorted({row["layout"] for row in rows})
        title = f"[{known['title']}](../examples/{known['folder']}/README.md)"
        overview.append(f"| {title} (`{engine}`) | {recorded[engine]['versions']} | {'; '.join(layouts)} |")
        sections.append(_section(known, rows, layouts))
    return "\n".join([HEAD, *overview, "", "\n".join(sections)])


def _section(known: dict[str, Any], rows: list[dict[str, str]], layouts: list[str]) -> str:
    lines = [f"## {known['title']}", "", "| layout | feature | models | dtypes |", "|---|---|---|---|"]
    for layout in layouts:
        for feature in sorted({row["feature"] for row in rows if row["layout"] == layout}):
            found = [row for row in rows if (row["layout"], row["feature"]) == (layout, feature)]
            models, dtypes = (", ".join(sorted({row[name] for row in found})) for name in ("model", "dtype"))
            lines.append(f"| {layout} | {feature} | {models} | {dtypes} |")
    lines += ["", "Limits:", "", *(f"- {limit}" for limit in known["limits"]), ""]
    return "\n".join(lines)


def main() -> None:
    recorded = json.loads((FOLDER / "support.json").read_text(encoding="utf-8"))
    described = tomllib.loads((FOLDER / "support.toml").read_text(encoding="utf-8"))
    (FOLDER / "support.md").write_text(render(recorded, described), encoding="utf-8")


if __name__ == "__main__":
    main()

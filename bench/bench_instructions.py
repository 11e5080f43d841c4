"""How many instructions fixed pieces of work take, and whether it is more than it was: `make bench-check`.

    python bench/bench_instructions.py             # counts, compares with what was kept last, fails on 5 % more
    python bench/bench_instructions.py --record    # keeps what it counts, for this commit

Times of a busy machine differ by half from run to run; these counts do not differ at all, so one per cent shows. They
are Callgrind's (https://valgrind.org/docs/manual/cl-manual.html), of the product's own sources, compiled as CMake
compiles them: for the plainest CPU of its kind, since Valgrind knows no AVX-512. What instructions cost, such as memory
that is not in a cache, they do not tell: that is for the other benches. Counts of another compiler, C library or
Valgrind are not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import REPOSITORY, describe

RESULT = REPOSITORY / "bench" / "results" / "instructions.json"
COMMAND = "python bench/bench_instructions.py --record"
INSTALL = "apt-get install valgrind g++"
MORE_MAX = 0.05
KEPT_MAX = 5
RUN_SECONDS_MAX = 300
FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "-pthread")
INCLUDES = ("kvstore/native", "radix/csrc", "transport/csrc")
PROGRAMS = {
    "count_tree": ("radix/csrc", ("match", "miss", "insert", "evict", "key_hash")),
    "count_wire": ("transport/csrc", ("read_lookup", "read_response", "write_lookup")),
}
# The C library picks its copies by the CPU; so it picks the same ones everywhere.
PLAIN_COPIES = "glibc.cpu.hwcaps=-AVX2,-AVX,-AVX512F,-AVX512VL,-ERMS,-FSRM,-SSE4_1,-SSE4_2,-SSSE3"

Counts = dict[str, int]


def toolchain() -> dict[str, str]:
    """What the counts depend on beside the sources."""
    return {
        "compiler": _first_line("g++", "--version"),
        "libc": " ".join(platform.libc_ver()),
        "valgrind": _first_line("valgrind", "--version"),
        "machine": platform.machine(),
        "flags": " ".join(FLAGS),
    }


def _first_line(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def compiled(folder: Path, name: str, sources: str) -> Path:
    """The program of one of PROGRAMS with all sources as one unit, which takes a third of the time of many."""
    found = sorted(source for source in (REPOSITORY / sources).glob("*.cpp") if source.name != "bindings.cpp")
    unit = folder / f"{name}_all.cpp"
    unit.write_text("".join(f'#include "{file}"\n' for file in [REPOSITORY / "bench" / f"{name}.cpp", *found]))
    program = folder / name
    includes = [f"-I{REPOSITORY / include}" for include in INCLUDES]
    subprocess.run(["g++", *FLAGS, *includes, str(unit), "-o", str(program)], check=True)
    return program


def counted(program: Path, row: str) -> int:
    """Instructions of one piece of work."""
    command = ["valgrind", "--tool=callgrind", "--toggle-collect=measured", "--callgrind-out-file=/dev/null"]
    done = subprocess.run(
        [*command, str(program), row],
        env={**os.environ, "GLIBC_TUNABLES": PLAIN_COPIES},
        capture_output=True,
        text=True,
        check=True,
        timeout=RUN_SECONDS_MAX,
    )
    found = re.search(r"Collected : (\d+)", done.stderr)
    if found is None:
        raise SystemExit(f"{row}: expected a line 'Collected : N' from Valgrind, got: {done.stderr}")
    return int(found[1])


def count_all() -> Counts:
    """Instructions of each row."""
    with tempfile.TemporaryDirectory(prefix="kvstore-instructions-") as folder:
        counts = {}
        for name, (sources, rows) in PROGRAMS.items():
            program = compiled(Path(folder), name, sources)
            counts |= {row: counted(program, row) for row in rows}
        return counts


def grown(before: Counts, now: Counts) -> list[str]:
    """A line for each row that takes more than MORE_MAX more than it did, or that is no longer counted."""
    lost = [f"{row}: was counted before, and is no more" for row in before if row not in now]
    more = [
        f"{row}: {now[row]:,} instructions, {now[row] / before[row] - 1:.1%} more than {before[row]:,}"
        for row in before
        if row in now and now[row] > before[row] * (1 + MORE_MAX)
    ]
    return lost + more


def table(before: Counts, now: Counts) -> str:
    """All rows, for people."""
    lines = [f"{'row':<14} {'kept':>12} {'now':>12} {'change':>8}"]
    for row, count in now.items():
        change = f"{count / before[row] - 1:+.1%}" if row in before else "new"
        lines.append(f"{row:<14} {before.get(row, 0):>12,} {count:>12,} {change:>8}")
    return "\n".join(lines)


def recorded(entries: list[dict[str, object]], now: Counts, tools: dict[str, str]) -> list[dict[str, object]]:
    """The entries with those of this commit behind them; of the same commit and tools, the newer stay alone."""
    machine = describe()
    entry = {name: machine[name] for name in ("commit", "changed_files", "time")} | {
        "toolchain": tools,
        "instructions": now,
    }
    others = [old for old in entries if (old["commit"], old["toolchain"]) != (entry["commit"], tools)]
    return [*others, entry][-KEPT_MAX:]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Count instructions of fixed pieces of work and compare them.")
    parser.add_argument("--record", action="store_true", help="keep the counts for this commit")
    parser.add_argument("--json", type=Path, default=RESULT, help="where they are kept (default: %(default)s)")
    chosen = parser.parse_args(words)
    missing = [name for name in ("valgrind", "g++") if shutil.which(name) is None]
    if missing:
        print(f"bench-check: skipped, {' and '.join(missing)} not found: {INSTALL}")
        return 0
    tools = toolchain()
    entries = json.loads(chosen.json.read_text())["entries"] if chosen.json.exists() else []
    same = [entry["instructions"] for entry in entries if entry["toolchain"] == tools]
    now = count_all()
    print(table(same[-1] if same else {}, now))
    if chosen.record:
        kept = {"command": COMMAND, "entries": recorded(entries, now, tools)}
        chosen.json.write_text(json.dumps(kept, indent=1) + "\n")
        return 0
    if not same:
        print(f"bench-check: nothing kept is of these tools, so nothing was compared; keep these counts: {COMMAND}")
        return 0
    found = grown(same[-1], now)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

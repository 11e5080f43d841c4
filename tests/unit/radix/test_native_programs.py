"""What only a program of its own can show: damage inside the tree, and data races. Compiled here from the sources."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kvstore.testing.patience import ANSWER_SECONDS

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CSRC = ROOT / "radix" / "csrc"
SOURCES = [source for source in sorted(CSRC.glob("*.cpp")) if source.name != "bindings.cpp"]
CORRUPTIONS_MIN = 57

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def compiled(folder: Path, name: str, *flags: str) -> Path:
    """The program with all sources of the tree as one unit, which takes a third of the time of many."""
    unit = folder / f"{name}_all.cpp"
    unit.write_text("".join(f'#include "{source}"\n' for source in [HERE / f"{name}.cpp", *SOURCES]))
    program = folder / name
    includes = [f"-I{CSRC}", f"-I{ROOT / 'kvstore' / 'native'}"]
    subprocess.run(["g++", "-std=c++17", "-pthread", *flags, *includes, unit, "-o", program], check=True)
    return program


def test_each_planted_corruption_is_found(tmp_path: Path) -> None:
    done = subprocess.run(
        [compiled(tmp_path, "planted_corruptions", "-O0")],
        check=True,
        capture_output=True,
        text=True,
        timeout=ANSWER_SECONDS,
    )
    found = {name: int(count) for name, count in (line.rsplit(": ", 1) for line in done.stdout.splitlines())}
    assert 0 == found.pop("nothing")
    assert len(found) >= CORRUPTIONS_MIN
    assert [] == [name for name, problems in found.items() if not problems]


@pytest.mark.slow
def test_matches_beside_a_writer_race_with_nothing_and_are_right(tmp_path: Path) -> None:
    program = compiled(tmp_path, "threaded_matches", "-O1", "-g", "-fsanitize=thread")
    done = subprocess.run([program, "20000"], check=False, capture_output=True, text=True, timeout=240)
    assert 0 == done.returncode, done.stdout + done.stderr
    settled, blocks = (int(word) for word in done.stdout.split()[1::2])
    assert settled > 1000
    assert blocks > settled

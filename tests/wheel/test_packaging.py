"""What is built and installed: one package, with nothing else at the top, that needs neither torch nor an engine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ("torch", "transformers", "vllm", "sglang", "cupy", "llama_cpp")
IMPORTS = "import kvstore, kvstore.cli, kvstore.config, kvstore.server, kvstore.store, kvstore.transport.client"


def run(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_the_base_install_asks_for_no_engine():
    required = [line for line in distribution("prefix-kvstore").requires or [] if "extra ==" not in line]

    assert [] == [line for line in required if re.match("|".join(ENGINES), line)]


def test_the_command_the_plug_in_and_the_licences_are_declared():
    metadata = distribution("prefix-kvstore")

    expected = {"console_scripts": "kvstore.cli:main", "vllm.general_plugins": "kvstore.connectors.vllm:register"}
    assert expected == {entry.group: entry.value for entry in metadata.entry_points if entry.name == "kvstore"}
    assert {"LICENSE", "THIRD_PARTY_NOTICES"} == set(metadata.metadata.get_all("License-File") or [])


def test_the_product_imports_without_any_engine():
    code = f"import sys\nfor name in {ENGINES}: sys.modules[name] = None\n{IMPORTS}"

    run(sys.executable, "-P", "-W", "error", "-c", code)


def test_the_folders_cannot_be_imported_by_their_bare_names():
    for folder in ("radix", "tiers", "transport", "connectors"):
        done = subprocess.run(
            [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert f"import kvstore.{folder}, not {folder}" in done.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git has, so that no build product of this checkout is seen or touched."""
    target = tmp_path_factory.mktemp("checkout")
    for name in run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines():
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


def build(source: Path, kind: str) -> Path:
    """Build with the tools of this environment; isolation would only download them again."""
    run(sys.executable, "-m", "build", "--no-isolation", f"--{kind}", source)
    (made,) = (source / "dist").glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    return build(checkout, "wheel")


@pytest.fixture(scope="module")
def sdist(checkout: Path) -> Path:
    return build(checkout, "sdist")


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = names_in(wheel)

    assert {"kvstore", "prefix_kvstore-0.1.0.dist-info"} == {name.split("/")[0] for name in names}
    assert {"kvstore/py.typed", "kvstore/demo/handbook.txt"} <= names
    assert {"LICENSE", "THIRD_PARTY_NOTICES"} == {Path(name).name for name in names if "/licenses/" in name}
    stray = re.compile(r"\.(cpp|h|proto|md)$|/(native|tests|bench)/|__pycache__")
    assert {"copy_kernels.cuh", "copy_piece.cuh"} == {Path(name).name for name in names if "/csrc/" in name}
    assert [] == sorted(name for name in names if stray.search(name))
    run(sys.executable, "-m", "check_wheel_contents", "--toplevel", "kvstore", wheel)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_wheel_made_from_the_sdist_has_the_same_files(wheel, sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()

    assert len(names) == len(set(names))
    assert not any("/tests/" in name or "/bench/" in name for name in names)
    assert names_in(wheel) == names_in(build(source, "wheel"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_works_in_a_fresh_environment_beside_py_radix(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    run(python, "-m", "pip", "install", "--quiet", wheel, "py-radix")
    code = (
        "import radix, kvstore, kvstore.radix\n"
        "assert radix.__file__ != kvstore.radix.__file__\n"
        "with kvstore.open(None, host_bytes=2**24) as store: print(store.stats().namespaces)"
    )

    assert "usage: kvstore" in run(tmp_path / "venv/bin/kvstore", "--help", cwd=tmp_path)
    assert "0" == run(python, "-W", "error", "-c", code, cwd=tmp_path).strip()
    installed = run(python, "-m", "pip", "list", cwd=tmp_path)
    assert [] == [name for name in ENGINES if re.search(rf"^{name}\b", installed, re.MULTILINE)]

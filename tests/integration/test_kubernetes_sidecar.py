"""The sidecar and the directory of deploy/kubernetes, started as they are there, with secrets made as the docs say."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.testing.valkey_server import server_binary

yaml = pytest.importorskip("yaml", reason="of the development tools")
pytest.importorskip("cryptography", reason="needs the extra certs")
pytest.importorskip("redis", reason="needs the extra cluster")

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "deploy/kubernetes/base"
NODE = "node-7"
ENDPOINT = "10-0-0-7.kvstore-nodes.kvstore.svc.cluster.local"
pytestmark = [
    pytest.mark.skipif(not BASE.exists(), reason="the manifests are not part of an installation"),
    pytest.mark.skipif(server_binary() is None, reason="neither Valkey nor Redis is installed"),
]


def container(file):
    document = next(iter(yaml.safe_load_all((BASE / file).read_text(encoding="utf-8"))))
    return document["spec"]["template"]["spec"]["containers"][0]


@contextlib.contextmanager
def started(words, **options):
    """A process and the lines of its output."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def commands(tmp_path):
    """A PATH with `kvstore`, and nothing of this process's settings."""
    program = tmp_path / "bin/kvstore"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m kvstore.cli "$@"\n')
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}


@pytest.fixture
def secrets(tmp_path, commands):
    """The folder of secrets, made by the lines of the docs, with the files of kvstore-node under their names there."""
    folder = tmp_path / "secrets"
    folder.mkdir()
    text = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^ *```sh\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    subprocess.run(["/bin/bash", "-ec", script], cwd=folder, env=commands, check=True, capture_output=True)
    made = yaml.safe_load((ROOT / "deploy/kubernetes/secrets/kustomization.yaml").read_text(encoding="utf-8"))
    for secret in made["secretGenerator"]:
        for line in secret["files"]:
            name, _, source = line.partition("=")
            (folder / (source or name)).rename(folder / name)
            (folder / name).chmod(0o440)  # as fsGroup leaves them
    return folder


@pytest.fixture
def directory(secrets, tmp_path):
    """Valkey with the arguments of its Deployment, on a socket instead of its port."""
    given = container("valkey.yaml")
    arguments = [str(secrets / "valkey.conf") if word == "/etc/valkey/valkey.conf" else word for word in given["args"]]
    path = tmp_path / "v"
    words = [server_binary(), *arguments, "--port", "0", "--unixsocket", str(path)]
    with started(words, cwd=tmp_path) as process:
        assert next(line for line in process.stdout if "Ready to accept connections" in line)
        yield f"valkey+unix://{path}"


@pytest.fixture
def moved(secrets, directory, tmp_path):
    """What stands in the manifests, and what it is here: folders, sizes, group, and ports that are free."""
    return {
        "/etc/kvstore/secrets": str(secrets),
        "/etc/kvstore/config": str(tmp_path),
        "/run/kvstore": str(tmp_path),
        "/var/lib/kvstore": str(tmp_path / "data"),
        "tls://0.0.0.0:7070": "tls://127.0.0.1:0",
        "127.0.0.1:9464": "127.0.0.1:0",
        '"64071"': f'"{os.getgid()}"',
        "24GiB": "16MiB",
        "400GiB": "64MiB",
        "valkey://kvstore-valkey:6379": directory,
    }


def translated(text, moved):
    for there, here in moved.items():
        text = text.replace(there, here)
    return text


@pytest.fixture
def environment(commands, moved):
    given = {variable["name"]: variable.get("value") for variable in container("daemonset.yaml")["env"]}
    told = {"NODE_NAME": NODE, "POD_IP": "10.0.0.7", "POD_NAMESPACE": "kvstore"}
    values = {name: told.get(name) or translated(text, moved) for name, text in given.items()}
    return {**commands, **values}


@pytest.fixture
def sidecar(moved, environment, tmp_path):
    """The container's process, and its ready line."""
    settings = translated((BASE / "kvstore.toml").read_text(encoding="utf-8"), moved)
    (tmp_path / "kvstore.toml").write_text(settings)
    given = container("daemonset.yaml")
    words = [*given["command"], *(translated(text, moved) for text in given["args"])]
    with started(words, env=environment, stderr=subprocess.DEVNULL) as process:
        yield process, json.loads(process.stdout.readline())


def probe(name, ready):
    """The exit code of a probe."""
    words = container("daemonset.yaml")[name]["exec"]["command"]
    host, _, port = ready["metrics"].rpartition(":")
    asked = [word.replace("/127.0.0.1/9464", f"/{host}/{port}") for word in words]
    return subprocess.run(asked, capture_output=True, timeout=ANSWER_SECONDS, check=False).returncode


def ask(environment, *words):
    done = subprocess.run(["kvstore", *words, "--json"], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_sidecar_joins_its_directory_answers_its_probes_and_stops_in_order(sidecar, environment):
    process, ready = sidecar
    assert [0, 0, 0] == [probe(name, ready) for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    (node,) = ask(environment, "nodes")["nodes"]
    assert (NODE, [f"tls://{ENDPOINT}:7070"]) == (node["name"], node["addresses"])
    process.send_signal(signal.SIGTERM)
    assert 0 == process.wait(timeout=ANSWER_SECONDS)
    assert [True, True] == [probe(name, ready) != 0 for name in ("livenessProbe", "readinessProbe")]


def test_its_certificate_is_for_the_name_of_each_endpoint_and_for_no_other(sidecar, secrets):
    _, ready = sidecar
    (address,) = [text for text in ready["listen"] if text.startswith("tls://")]
    host, _, port = address.removeprefix("tls://").rpartition(":")
    context = ssl.create_default_context(cafile=secrets / "ca.pem")
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((host, int(port)), 10) as plain, context.wrap_socket(plain, server_hostname=ENDPOINT):
        pass
    with (
        socket.create_connection((host, int(port)), 10) as plain,
        pytest.raises(ssl.SSLCertVerificationError),
        context.wrap_socket(plain, server_hostname="kvstore.example"),
    ):
        pass

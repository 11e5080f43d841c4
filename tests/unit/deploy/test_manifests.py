"""The manifests of deploy/ are what Kubernetes takes, and name nothing that the program does not have."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from kvstore.cli.parser import build_parser
from kvstore.config import load_config
from kvstore.connectors.vllm.settings import parse_settings
from kvstore.quantities import parse_duration
from kvstore.transport.address import TcpAddress, parse_address

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="of the development tools")
yaml = pytest.importorskip("yaml")
jsonschema = pytest.importorskip("jsonschema")

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy/kubernetes"
KUSTOMIZATIONS = sorted(FOLDER.glob("*/kustomization.yaml"))
VERSIONS = ("1.29", "1.37")
SECRETS = "/etc/kvstore/secrets/"
pytestmark = pytest.mark.skipif(not KUSTOMIZATIONS, reason="the manifests are not part of an installation")
# What we use of monitoring.coreos.com/v1, after the API reference of Prometheus Operator.
SERVICE_MONITOR = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "ServiceMonitor"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["selector", "endpoints"],
            "properties": {
                "selector": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"matchLabels": {"type": "object", "additionalProperties": {"type": "string"}}},
                },
                "endpoints": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {
                            "port": {"type": "string"},
                            "path": {"type": "string", "pattern": "^/"},
                            "scheme": {"enum": ["http", "https"]},
                            "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
                            "bearerTokenFile": {"type": "string"},
                            "tlsConfig": {
                                "type": "object",
                                "additionalProperties": False,
                                "properties": {"insecureSkipVerify": {"type": "boolean"}},
                            },
                            "relabelings": {
                                "type": "array",
                                "items": {
                                    "type": "object",
                                    "additionalProperties": False,
                                    "properties": {
                                        "sourceLabels": {"type": "array", "items": {"type": "string"}},
                                        "targetLabel": {"type": "string"},
                                    },
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}


@cache
def kustomization(folder):
    return yaml.safe_load((FOLDER / folder / "kustomization.yaml").read_text(encoding="utf-8"))


@cache
def objects():
    """Every object, by kind and name; the DaemonSet once more as `monitoring` makes it."""
    found = {}
    for path in sorted(FOLDER.glob("*/*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if isinstance(document, dict) and document["kind"] != "Kustomization":
                found[document["kind"], document["metadata"]["name"]] = document
    found["DaemonSet", "monitored"] = patched(found["DaemonSet", "kvstore"], FOLDER / "monitoring/proxy.yaml")
    return found


def patched(document, path):
    """The object with a JSON patch, RFC 6902: `replace` of a field, `add` at the end of a list."""
    changed = copy.deepcopy(document)
    for change in yaml.safe_load(path.read_text(encoding="utf-8")):
        *steps, last = change["path"].strip("/").split("/")
        place = changed
        for step in steps:
            place = place[step]
        if last == "-":
            assert "add" == change["op"]
            place.append(change["value"])
        else:
            assert "replace" == change["op"]
            assert last in place
            place[last] = change["value"]
    return changed


def check(document, version):
    if document["kind"] == "ServiceMonitor":
        jsonschema.validate(document, SERVICE_MONITOR)
    else:
        kubernetes_validate.validate(document, version, strict=True)


def of_kind(kind):
    return {name: document for (of, name), document in objects().items() if of == kind}


def sidecar_pod(name="kvstore"):
    return objects()["DaemonSet", name]["spec"]["template"]["spec"]


def sidecar():
    return sidecar_pod()["containers"][0]


@cache
def settings():
    return load_config(file=FOLDER / "base/kvstore.toml", environ={}).config


def tls_port():
    addresses = [parse_address(text) for text in settings().server.listen]
    (port,) = [address.port for address in addresses if isinstance(address, TcpAddress)]
    return port


def container_ports(name="kvstore"):
    return {port["name"]: port["containerPort"] for box in sidecar_pod(name)["containers"] for port in box["ports"]}


def mounts(container):
    return {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}


def generated_secrets():
    """The names of the files of each Secret."""
    made = kustomization("secrets")["secretGenerator"]
    return {secret["name"]: {line.partition("=")[0] for line in secret["files"]} for secret in made}


def serve_words():
    """The command line of the sidecar, with a shell's variables in it."""
    (script,) = sidecar()["args"]
    return shlex.split(script.removeprefix("exec "))


@pytest.mark.parametrize("version", VERSIONS)
def test_each_object_is_one_that_kubernetes_takes_with_no_field_it_does_not_know(version):
    for document in objects().values():
        check(document, version)


def test_a_field_that_is_misspelt_would_be_found():
    for kind, name in (("DaemonSet", "kvstore"), ("ServiceMonitor", "kvstore")):
        wrong = copy.deepcopy(objects()[kind, name])
        wrong["spec"]["selectors"] = {}
        with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
            check(wrong, VERSIONS[-1])


@pytest.mark.parametrize("path", KUSTOMIZATIONS, ids=lambda path: path.parent.name)
def test_a_kustomization_names_every_file_beside_it_and_no_other(path):
    made = yaml.safe_load(path.read_text(encoding="utf-8"))
    named = [*made.get("resources", []), *(patch["path"] for patch in made.get("patches", []))]
    named += [file for maker in made.get("configMapGenerator", []) for file in maker["files"]]
    local = {name for name in named if not name.startswith("../")}
    ignored = {"kustomization.yaml", ".gitignore"}
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "."],
        cwd=path.parent, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert set(tracked) - ignored == local


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", ["base", "monitoring", "vllm"])
def test_kustomize_puts_together_what_kubernetes_takes(folder):
    words = ["kubectl", "kustomize", str(FOLDER / folder)]
    built = subprocess.run(words, capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]})
    for document in yaml.safe_load_all(built.stdout):
        check(document, VERSIONS[-1])


def test_the_command_has_flags_that_serve_takes_and_reads_the_settings_where_they_are_mounted():
    arguments = build_parser().parse_args(serve_words()[1:])
    volumes = {volume["name"]: volume for volume in sidecar_pod()["volumes"]}
    (maker,) = kustomization("base")["configMapGenerator"]
    assert maker["name"] == volumes["config"]["configMap"]["name"]
    assert [f"{mounts(sidecar())['config']}/{name}" for name in maker["files"]] == [arguments.config]


def test_every_variable_is_a_setting_or_used_by_the_command():
    for variable in sidecar()["env"]:
        name = variable["name"]
        if name.startswith("KVSTORE_"):
            assert load_config(environ={name: variable["value"]})
        else:
            assert re.search(rf"\$\{{?{name}\b", sidecar()["args"][0])


def test_commands_in_the_pod_ask_the_sidecar_with_the_operators_token():
    environ = {variable["name"]: variable.get("value") for variable in sidecar()["env"]}
    config = load_config(environ={name: text for name, text in environ.items() if text}).config
    assert config.address in settings().server.listen
    assert config.client.token_file == f"{SECRETS}operators.token"


def test_every_file_that_the_settings_name_is_mounted_from_a_secret():
    config = settings()
    named = {
        config.tls.cert, config.tls.key, config.auth.file, config.cluster.directory_password_file,
        config.cluster.secret_file, config.cluster.tls_ca, config.cluster.token_file, f"{SECRETS}operators.token",
    }  # fmt: skip
    volumes = {volume["name"]: volume for volume in sidecar_pod()["volumes"]}
    assert f"{mounts(sidecar())['secrets']}/" == SECRETS
    assert {f"{SECRETS}{name}" for name in generated_secrets()["kvstore-node"]} == named
    assert "kvstore-node" == volumes["secrets"]["secret"]["secretName"]


def test_secrets_are_readable_by_the_group_of_the_pod_and_by_no_others():
    for name in ("DaemonSet", "kvstore"), ("Deployment", "kvstore-valkey"), ("Deployment", "vllm"):
        pod = objects()[name]["spec"]["template"]["spec"]
        modes = [volume["secret"]["defaultMode"] for volume in pod["volumes"] if "secret" in volume]
        assert [0o440] == modes
        assert pod["securityContext"]["fsGroup"] > 0


def test_the_socket_and_the_data_lie_in_folders_of_the_host_that_the_sidecar_owns():
    pod, config = sidecar_pod(), settings()
    user, socket_group = pod["securityContext"]["runAsUser"], int(config.server.unix_group)
    hosts = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
    (init,) = pod["initContainers"]
    assert {"socket", "data"} == set(hosts)
    assert hosts == {name: mounts(sidecar())[name] for name in hosts} == mounts(init)
    assert hosts["data"] == config.data_dir
    assert f"unix://{hosts['socket']}/kvstore.sock" in config.server.listen
    assert f"install -d -o {user} -g {socket_group} -m 0750 {hosts['socket']}" in init["args"][0]
    assert f"install -d -o {user} -g {user} -m 0700 {hosts['data']}" in init["args"][0]
    assert [socket_group] == pod["securityContext"]["supplementalGroups"]


def test_ports_are_those_of_the_settings_everywhere():
    config = settings()
    services, policies = of_kind("Service"), of_kind("NetworkPolicy")
    page = config.server.metrics_address.rpartition(":")[2]
    allowed = {name: [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]]
               for name, policy in policies.items()}  # fmt: skip
    valkey = objects()["Deployment", "kvstore-valkey"]["spec"]["template"]["spec"]["containers"][0]["ports"]
    proxy = sidecar_pod("monitored")["containers"][1]
    assert {"peers": tls_port()} == container_ports()
    assert serve_words()[-1].endswith(f":{tls_port()}")
    assert [tls_port()] == [port["port"] for port in services["kvstore-nodes"]["spec"]["ports"]] == allowed["kvstore"]
    assert config.cluster.directory == f"valkey://kvstore-valkey:{valkey[0]['containerPort']}"
    assert [6379] == [port["port"] for port in services["kvstore-valkey"]["spec"]["ports"]] == allowed["kvstore-valkey"]
    assert f"--upstream=http://127.0.0.1:{page}/" in proxy["args"]
    assert f"--secure-listen-address=:{container_ports('monitored')['metrics']}" in proxy["args"]
    assert (
        [9465] == [port["port"] for port in services["kvstore-metrics"]["spec"]["ports"]] == allowed["kvstore-metrics"]
    )


def test_services_and_policies_select_pods_that_there_are():
    pods = [document["spec"]["template"]["metadata"]["labels"]
            for (kind, _), document in objects().items() if kind in ("DaemonSet", "Deployment")]  # fmt: skip
    selectors = [service["spec"]["selector"] for service in of_kind("Service").values()]
    for policy in of_kind("NetworkPolicy").values():
        rules = [*policy["spec"]["ingress"], *policy["spec"].get("egress", [])]
        peers = [
            peer for rule in rules for peer in (*rule.get("from", []), *rule.get("to", [])) if "podSelector" in peer
        ]
        selectors += [policy["spec"]["podSelector"]["matchLabels"], *(p["podSelector"]["matchLabels"] for p in peers)]
    for document in of_kind("ServiceMonitor").values():
        labels = objects()["Service", "kvstore-metrics"]["metadata"]["labels"]
        assert document["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert [] == [selector for selector in selectors if not any(selector.items() <= pod.items() for pod in pods)]


def test_the_name_that_a_pod_advertises_is_one_of_the_service_and_of_its_certificate():
    namespace = kustomization("base")["namespace"]
    host = serve_words()[-1].removeprefix("tls://").rpartition(":")[0]
    host = host.replace("$POD_NAMESPACE", namespace).replace("${POD_IP//[.:]/-}", "*")
    assert f"*.kvstore-nodes.{namespace}.svc.cluster.local" == host
    assert f"--host '{host}'" in (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")


def test_the_container_has_the_memory_of_its_host_tier_and_three_gib_more():
    resources = sidecar()["resources"]
    gib = settings().tiers.host.capacity_bytes // 2**30 + 3
    assert f"{gib}Gi" == resources["limits"]["memory"] == resources["requests"]["memory"]


def test_containers_run_with_nothing_that_they_do_not_need():
    for name in "kvstore", "monitored":
        for container in sidecar_pod(name)["containers"]:
            context = container["securityContext"]
            assert (False, True) == (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"])
            assert {"drop": ["ALL"]} == context["capabilities"]
        assert sidecar_pod(name)["securityContext"]["runAsNonRoot"]
    assert ["CHOWN", "FOWNER"] == sidecar_pod()["initContainers"][0]["securityContext"]["capabilities"]["add"]


def test_a_pod_may_take_as_long_to_stop_as_its_calls_and_then_some():
    assert sidecar_pod()["terminationGracePeriodSeconds"] > 4 * settings().server.grace_seconds


def test_a_pod_that_stops_drains_first_by_a_command_that_is_right_and_leaves_time_for_the_rest():
    pod = sidecar_pod()
    (container,) = pod["containers"]
    program, *words = container["lifecycle"]["preStop"]["exec"]["command"]
    arguments = build_parser().parse_args(words)
    assert ("kvstore", "kvstore drain", None, False) == (program, arguments.title, arguments.node, arguments.undo)
    left_seconds = pod["terminationGracePeriodSeconds"] - parse_duration(arguments.seconds)
    assert left_seconds >= 120


def test_vllm_reaches_the_sidecar_of_its_node_with_a_token_and_the_group_of_the_socket():
    pod = objects()["Deployment", "vllm"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    transfer = json.loads(container["args"][container["args"].index("--kv-transfer-config") + 1])
    given = parse_settings(transfer["kv_connector_extra_config"])
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert given.address in settings().server.listen
    assert mounts(container)["kvstore-socket"] == volumes["kvstore-socket"]["hostPath"]["path"]
    assert given.address.startswith(f"unix://{mounts(container)['kvstore-socket']}/")
    assert [int(settings().server.unix_group)] == pod["securityContext"]["supplementalGroups"]
    assert given.token_file == f"{mounts(container)['kvstore-token']}/engines.token"
    assert {"engines.token"} == generated_secrets()[volumes["kvstore-token"]["secret"]["secretName"]]
    assert ("KvstoreConnector", "recompute") == (transfer["kv_connector"], transfer["kv_load_failure_policy"])

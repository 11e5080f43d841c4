"""Dashboards and rules: they ask only for what is exported, as Grafana and Prometheus understand it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from kvstore import metrics
from kvstore.cli import main
from kvstore.dashboards import BOARDS
from kvstore.dashboards.export import PROVISIONING, RULES
from kvstore.dashboards.grafana import as_json

REPOSITORY = Path(__file__).resolve().parents[3]
RULES_TEXT = (REPOSITORY / "kvstore" / "dashboards" / RULES).read_text()
QUERIES = [query for board in BOARDS for panel in board.panels for query in panel.queries]
ALERTS = [rule for group in yaml.safe_load(RULES_TEXT)["groups"] for rule in group["rules"] if "alert" in rule]
# What Prometheus adds itself, and what belongs to histograms.
ADDED_LABELS = {"instance", "job", "le"}


def labels_of() -> dict[str, set[str]]:
    """The labels of each exported series."""
    declared = (
        *metrics.PROCESS_METRICS,
        *metrics.MEMORY_METRICS,
        *metrics.CLUSTER_METRICS,
        *metrics.PEER_METRICS,
        *metrics.TENANT_METRICS,
        *metrics.STORE_METRICS,
    )
    labels = {metric.name: set(metric.labels) for metric in declared}
    labels |= {f"{metrics.CALL_SECONDS}_{part}": {"method", "status"} for part in ("bucket", "count", "sum")}
    return labels | {metrics.BUILD_INFO: {"version"}, metrics.LOOP_STALLS: set()}


def asked_of(expression: str) -> set[str]:
    recorded = set(re.findall(r"\b\w+:kvstore_\w+:\w+", expression))
    return set(re.findall(r"(?<![\w:])kvstore_\w+", expression)) - recorded


@pytest.mark.parametrize("expression", [query.expression for query in QUERIES])
def test_panels_ask_for_metrics_and_labels_that_are_exported(expression: str):
    known = labels_of()
    asked = asked_of(expression)
    assert set() == asked - set(known)
    named = {name for names in re.findall(r"by \(([^)]*)\)", expression) for name in re.findall(r"\w+", names)}
    named |= {name for inner in re.findall(r"{([^}]*)}", expression) for name in re.findall(r"(\w+)\s*[=!]~?", inner)}
    assert set() == named - set().union(*(known[name] for name in asked)) - ADDED_LABELS


@pytest.mark.parametrize("legend_of", QUERIES, ids=lambda query: query.legend)
def test_legends_name_labels_that_the_query_keeps(legend_of):
    kept = {name for names in re.findall(r"by \(([^)]*)\)", legend_of.expression) for name in re.findall(r"\w+", names)}
    assert set() == set(re.findall(r"{{(\w+)}}", legend_of.legend)) - kept


def test_rules_ask_for_metrics_that_are_exported():
    rules = [rule for group in yaml.safe_load(RULES_TEXT)["groups"] for rule in group["rules"]]
    assert set() == {name for rule in rules for name in asked_of(rule["expr"])} - set(labels_of())
    recorded = {rule["record"] for rule in rules if "record" in rule}
    used = {name for rule in rules for name in re.findall(r"\b\w+:kvstore_\w+:\w+", rule["expr"])}
    assert set() == used - recorded


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_grafana_reads_all_that_is_written(board):
    """By the typed models that Grafana makes from its own schemas: what these do not know, they lose."""
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins

    register_default_plugins()
    read = models.Dashboard.from_json(as_json(board))
    assert [] == lost(as_json(board), json.loads(JSONEncoder().encode(read)), board.uid)


def lost(written, read, place: str) -> list[str]:
    """Where what was read is less than what was written."""
    if isinstance(written, dict) and isinstance(read, dict):
        return [one for key, value in written.items() for one in lost(value, read.get(key), f"{place}.{key}")]
    if isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        return [one for at, value in enumerate(written) for one in lost(value, read[at], f"{place}[{at}]")]
    return [] if written == read else [f"{place}: {written!r}, read as {read!r}"]


def test_addresses_of_dashboards_and_questions_are_unique_and_few():
    assert len(BOARDS) == len({board.uid for board in BOARDS})
    questions = [panel.question for board in BOARDS for panel in board.panels]
    assert (len(questions), True) == (len(set(questions)), all(question.endswith("?") for question in questions))
    assert max(len(board.panels) for board in BOARDS) <= 8


def test_export_writes_all_of_it_and_says_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert 0 == main(["dashboards", "export", str(tmp_path / "made"), "--json"])
    files = json.loads(capsys.readouterr().out)["files"]
    assert {*(f"{board.uid}.json" for board in BOARDS), RULES, PROVISIONING} == {Path(file).name for file in files}
    assert as_json(BOARDS[0]) == json.loads((tmp_path / "made" / f"{BOARDS[0].uid}.json").read_text())


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    assert 1 == main(["dashboards", "export", str(tmp_path / "file" / "made")])
    assert "cannot be written: Not a directory; name a folder of yours" in capsys.readouterr().err


promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="there is no promtool: apt-get install prometheus")

ALERT_CASES = """
rule_files: [{rules}]
evaluation_interval: 30s
tests:
  - interval: 30s
    input_series:
      - {{series: 'up{{job="kvstore",instance="a"}}', values: '1x10 0x50'}}
      - {{series: 'kvstore_loop_stalls_total{{instance="a"}}', values: '0x10 1x50'}}
      - {{series: 'kvstore_failures_total{{instance="a"}}', values: '0x10 3x50'}}
      - {{series: 'kvstore_corrupt_blocks_total{{instance="a"}}', values: '0x10 1x50'}}
      - {{series: 'kvstore_disk_faults_total{{instance="a",kind="read_error"}}', values: '0x10 1x50'}}
      - {{series: 'kvstore_rejected_blocks_total{{instance="a",reason="full"}}', values: '0+10x60'}}
      - {{series: 'kvstore_stored_blocks_total{{instance="a"}}', values: '0+20x60'}}
      - {{series: 'kvstore_cluster_member{{instance="a"}}', values: '1x10 0x50'}}
      - {{series: 'kvstore_cluster_directory_failures_total{{instance="a"}}', values: '1x10 9x50'}}
    alert_rule_test:
      - {{eval_time: 4m, alertname: KvstoreDown}}
      - {{eval_time: 4m, alertname: KvstoreFailures}}
      - {{eval_time: 8m, alertname: KvstoreDown, exp_alerts: [{{
          exp_labels: {{severity: page, job: kvstore, instance: a}},
          exp_annotations: {{summary: "kvstore on a does not answer; engines compute everything themselves"}}}}]}}
      - {{eval_time: 8m, alertname: KvstoreLoopStalls, exp_alerts: [{{exp_labels: {{severity: page, instance: a}},
          exp_annotations: {{summary: "the event loop of kvstore on a stood still; its log says where"}}}}]}}
      - {{eval_time: 8m, alertname: KvstoreDiskFaults, exp_alerts: [{{
          exp_labels: {{severity: ticket, instance: a, kind: read_error}},
          exp_annotations: {{summary: "the disk of kvstore on a failed: read_error"}}}}]}}
      - {{eval_time: 25m, alertname: KvstoreStoresRefused, exp_alerts: [{{exp_labels: {{severity: ticket, instance: a}},
          exp_annotations: {{summary: "a has no room for more than a tenth of what engines store"}}}}]}}
      - {{eval_time: 15m, alertname: KvstoreNotMember, exp_alerts: [{{exp_labels: {{severity: ticket, instance: a}},
          exp_annotations: {{summary: "a is not in the directory of its cluster; peers get nothing from it"}}}}]}}
  - interval: 30s
    input_series:
      - {{series: 'kvstore_hit_tokens_total{{instance="a",tier="host"}}', values: '0+60x120'}}
      - {{series: 'kvstore_hit_tokens_total{{instance="a",tier="disk"}}', values: '0+20x120'}}
      - {{series: 'kvstore_lookup_tokens_total{{instance="a"}}', values: '0+100x120'}}
    promql_expr_test:
      - {{expr: 'instance:kvstore_hit_tokens:ratio_rate5m', eval_time: 30m,
         exp_samples: [{{labels: 'instance:kvstore_hit_tokens:ratio_rate5m{{instance="a"}}', value: 0.8}}]}}
"""


@promtool
def test_rules_hold_and_fire_when_they_should(tmp_path: Path):
    """Each by Prometheus' own test of rules."""
    rules = tmp_path / RULES
    rules.write_text(RULES_TEXT)
    cases = tmp_path / "cases.yaml"
    cases.write_text(ALERT_CASES.format(rules=rules.name))
    for check in (["check", "rules", rules], ["test", "rules", cases]):
        done = subprocess.run(["promtool", *check], capture_output=True, text=True, cwd=tmp_path)
        assert 0 == done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_each_alert_says_what_is_wrong_and_the_runbook_what_to_do(alert):
    assert alert["annotations"]["summary"]
    assert alert["labels"]["severity"] in ("page", "ticket")
    assert f"### {alert['alert']}\n" in (REPOSITORY / "docs" / "alerts.md").read_text()

"""The connector in vLLM's own classes, without an engine: its hooks fit, and none fails where it cannot work."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found(vllm_python, tmp_path_factory):
    script = Path(__file__).with_name("vllm_hooks.py")
    run = subprocess.run(
        [vllm_python, "-P", script], cwd=tmp_path_factory.mktemp("hooks"), capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout) | {"log": run.stderr}


def test_the_name_is_registered_once_and_every_hook_has_the_parameters_of_vllms(found):
    assert (found["registered"], found["strange"]) == (True, [])


@pytest.mark.parametrize("role", ["scheduler", "worker"])
def test_a_connector_that_cannot_work_says_so_once_and_answers_as_if_it_were_not_there(found, role):
    nothing = [[0, False], {}, [False, None], [False, None], [None, None], [], False, False, True, "UNSOUND"]
    assert found[role] == [*nothing, {"failures:ConfigError": 1}, None]
    assert found["log"].count("setting 'adress' is unknown") == 2  # once in each process of vLLM's


def test_what_was_counted_is_added_up_and_shown_in_metrics(found):
    shown = [line for line in found["metrics"] if not line.endswith(" 0.0")]
    assert shown == [
        'vllm:prefix_kvstore_bypassed_total{engine="0",model_name="tiny",reason="late"} 1.0',
        'vllm:prefix_kvstore_loaded_tokens_total{engine="0",model_name="tiny"} 7.0',
    ]

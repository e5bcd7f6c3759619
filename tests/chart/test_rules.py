"""Recording and alert rules: promtool proves them on made-up series; each alert is tried and has its runbook."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.test_chart import CHART, ROOT, needs_helm, of_kind
from tests.chart.test_options import rendered
from tests.test_docs import anchors

RULES = CHART / "rules/mini-infer.yaml"
CASES = Path(__file__).with_name("rules.test.yaml")
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not on PATH (Debian, Ubuntu: apt-get install prometheus)"
)


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def expected(alert: str) -> list[bool]:
    """For each case that looks at the alert: whether it is to fire there."""
    tests = yaml.safe_load(CASES.read_text())["tests"]
    found = [case for test in tests for case in test.get("alert_rule_test", ()) if case["alertname"] == alert]
    return [bool(case["exp_alerts"]) for case in found]


@needs_promtool
def test_alert_rules_pass_their_promtool_cases() -> None:
    done = subprocess.run(["promtool", "test", "rules", CASES], capture_output=True, text=True, cwd=CASES.parent)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", sorted(alerts()))
def test_each_alert_has_cases_in_which_it_fires_and_does_not(alert: str) -> None:
    assert set(expected(alert)) == {True, False}


@pytest.mark.parametrize("alert", sorted(alerts()))
def test_each_alert_has_a_severity_and_an_existing_runbook(alert: str) -> None:
    rule = alerts()[alert]
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    page, _, section = rule["annotations"]["runbook"].partition("#")
    assert section in anchors(ROOT / page)
    assert alert in (ROOT / page).read_text()


@pytest.mark.cluster
@needs_helm
def test_the_chart_renders_the_alert_rules_unchanged() -> None:
    (rule,) = of_kind(rendered("--set=monitoring.monitors=true"), "PrometheusRule").values()
    assert rule["spec"] == yaml.safe_load(RULES.read_text())

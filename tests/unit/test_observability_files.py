"""Rules, dashboard and document speak of metrics that there are; each alert was seen to fire and to be silent."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.runtime.metrics_table import COMMON, SERVICES, TABLE, Kind

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docker" / "observability"
RULES, TESTS = FOLDER / "rules.yml", FOLDER / "rules_test.yml"
NAME = re.compile(r"\b(?:headway_[a-z_]+|sglang:[a-z_]+|process_[a-z_]+)\b(?!-)")
sys.path.insert(0, str(ROOT / "tools"))

from get_promtool import promtool  # noqa: E402 - a tool is no package

SHOWN = {
    name for spec in TABLE for name in ([spec.name] if spec.kind is not Kind.HISTOGRAM else [f"{spec.name}_bucket"])
}


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def checker() -> str:
    try:
        return promtool()
    except LookupError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize(("words"), [("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml")])
def test_promtool_finds_the_rules_well(checker: str, words: tuple[str, ...]) -> None:
    done = subprocess.run([checker, *words], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_reads_the_configuration(checker: str) -> None:
    words = [checker, "check", "config", "--syntax-only", "prometheus.yml"]
    done = subprocess.run(words, cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_use_metrics_that_are_shown() -> None:
    for rule in rules():
        assert set(NAME.findall(rule["expr"])) - SHOWN == set(), rule["alert"]


def test_every_alert_is_tested_to_fire_and_to_be_silent() -> None:
    alerts = {rule["alert"] for rule in rules()}
    asked = [one for test in yaml.safe_load(TESTS.read_text())["tests"] for one in test["alert_rule_test"]]
    assert {one["alertname"] for one in asked if one.get("exp_alerts")} == alerts
    assert {one["alertname"] for one in asked if not one.get("exp_alerts")} == alerts


def test_every_alert_has_its_advice() -> None:
    told = re.findall(r"^\| (Headway\w+) \|", (ROOT / "docs/operations.md").read_text(), re.MULTILINE)
    assert sorted(told) == sorted(rule["alert"] for rule in rules())


def test_the_dashboard_and_the_document_are_those_of_the_table() -> None:
    words = [sys.executable, str(ROOT / "tools/observability.py"), "--check"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_has_every_metric_and_no_other() -> None:
    text = json.dumps(json.loads((FOLDER / "grafana/dashboards/headway.json").read_text()))
    wanted = {name for name in SHOWN if not name.endswith("_info")}
    assert set(NAME.findall(text)) == wanted


def test_prometheus_scrapes_every_service() -> None:
    jobs = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    targets = {(name, found["port"]) for job in jobs for found in job["dns_sd_configs"] for name in found["names"]}
    assert {(service, 8470) for service in SERVICES} | {("inference", 8000)} <= targets


def test_common_metrics_are_those_of_every_service() -> None:
    assert {spec.services for spec in COMMON} == {SERVICES}

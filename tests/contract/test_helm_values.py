"""What the chart can be told is written once, in values.yaml: the schema follows, and all services are told alike."""

import subprocess
import sys

import yaml
from helm_chart import CHART, ROOT

SERVICES = ("nameResolve", "reward", "rolloutController", "inference", "trainer", "etcd")


def test_the_schema_is_what_the_values_say() -> None:
    made = subprocess.run([sys.executable, "tools/helm_schema.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr


def test_all_services_have_the_same_keys_in_the_same_order() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    keys = {name: list(values[name]) for name in SERVICES}
    assert all(found == keys["nameResolve"] for found in keys.values()), keys


def test_no_secret_has_a_place_among_the_values() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["externalEtcd"]["passwordSecret"] == {"name": "", "key": "password"}
    assert [values[name]["secretEnv"] for name in SERVICES] == [{}] * len(SERVICES)

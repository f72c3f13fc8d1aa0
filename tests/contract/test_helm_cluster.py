"""A real API server takes the chart: install, upgrade, rollback and uninstall, with Helm 3 and 4.

Wants KUBECONFIG to name a cluster on which namespaces may be made; pods need not run there.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from helm_chart import CHART, MAJORS
from helm_cluster import DEADLINE_S, Cluster, new_namespace

pytestmark = pytest.mark.timeout(8 * DEADLINE_S)

CPU = ("--values", str(CHART / "profiles" / "cpu.yaml"))
SEVERAL = (
    "--set=trainer.replicas=2,experiment.overrides.allocation_mode=sglang:d2+d2",
    "--set=persistence.weights.keep=true",
)


@pytest.fixture(params=MAJORS)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with new_namespace(request.param) as made:
        yield made


def pods_of(cluster: Cluster, component: str) -> list[dict[str, Any]]:
    label = "app.kubernetes.io/component"
    return [pod for pod in cluster.get("pods").values() if pod["metadata"]["labels"].get(label) == component]


def test_a_release_comes_changes_goes_back_and_goes(cluster: Cluster) -> None:
    notes = cluster.helm("install", "headway", str(CHART), *CPU)
    assert "port-forward svc/headway-rollout-controller 8470" in notes
    assert "http://127.0.0.1:8470/ " in notes
    assert "nobody can control the run" in notes
    expected = {"name-resolve": 1, "reward": 2, "rollout-controller": 1, "inference": 2, "trainer": 1, "etcd": 1}
    for component, number in expected.items():
        cluster.wait_for(f"{number} pods of {component}", lambda c=component, n=number: len(pods_of(cluster, c)) == n)
    before = cluster.get("configmaps")["headway-experiment"]["data"]

    notes = cluster.helm("upgrade", "headway", str(CHART), *CPU, "--set=api.tokenSecret.name=headway-api")
    assert "get secret headway-api" in notes
    cluster.helm("upgrade", "headway", str(CHART), *CPU, "--set=experiment.content=seed: 7\nactor: {path: models/x}\n")
    assert cluster.get("configmaps")["headway-experiment"]["data"] != before
    cluster.helm("rollback", "headway", "1")
    assert cluster.get("configmaps")["headway-experiment"]["data"] == before
    history = json.loads(cluster.helm("history", "headway", "--output", "json"))
    assert [(one["revision"], one["status"]) for one in history][-1] == (4, "deployed")

    cluster.helm("uninstall", "headway")
    assert not cluster.get("deployments,statefulsets,services,networkpolicies,serviceaccounts,configmaps")


def test_what_is_to_be_kept_survives_an_uninstall_and_is_taken_up_again(cluster: Cluster) -> None:
    keep = [f"--set=persistence.{name}.keep=true" for name in ("weights", "journal", "checkpoints")]
    cluster.helm("install", "headway", str(CHART), *CPU, *keep)
    claims = {name: one["metadata"]["uid"] for name, one in cluster.get("pvc").items() if "data" not in name}
    assert set(claims) == {"headway-weights", "headway-journal", "headway-checkpoints"}
    cluster.helm("uninstall", "headway")
    cluster.helm("install", "headway", str(CHART), *CPU, *keep)
    again = {name: one["metadata"]["uid"] for name, one in cluster.get("pvc").items() if "data" not in name}
    assert again == claims


def test_a_set_of_several_nodes_is_replaced_as_a_whole(cluster: Cluster) -> None:
    cluster.helm("install", "headway", str(CHART), *CPU, *SEVERAL)
    cluster.wait_for("trainer of two pods", lambda: len(pods_of(cluster, "trainer")) == 2)
    before = {pod["metadata"]["name"] for pod in pods_of(cluster, "trainer")}
    cluster.helm("upgrade", "headway", str(CHART), *CPU, *SEVERAL, "--set=experiment.overrides.seed=7")

    def is_replaced() -> bool:
        """No pod of the old set is left. Pods that were never on a node are gone at once."""
        names = {pod["metadata"]["name"] for pod in pods_of(cluster, "trainer")}
        return len(names) == 2 and names.isdisjoint(before)

    cluster.wait_for("new set in place of the old one", is_replaced)


def test_the_server_itself_finds_nothing_wrong_with_any_profile(cluster: Cluster) -> None:
    for path in sorted((CHART / "profiles").glob("*.yaml")):
        cluster.helm("install", "headway", str(CHART), "--values", str(path), "--dry-run=server")

"""On a cluster with nodes: pods become ready, train to the end, and an upgrade in the midst of it loses nothing.

Wants KUBECONFIG, images where the nodes find them, volumes for the claims of profiles/cpu.yaml, and in
HEADWAY_HELM_PODS what helm is to be told of them: HEADWAY_HELM_PODS="--set=image.prefix=registry.example/headway".
"""

import json
import os
import time
from collections.abc import Callable
from subprocess import CalledProcessError
from typing import Any

import pytest
from helm_chart import CHART
from helm_cluster import Cluster, new_namespace

DEADLINE_S = 900.0
STEPS, BATCH = 24, 32
ASK = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8470/v1/status', timeout=5).read().decode())"
"""Within the pod, where reading is open."""
RUN = (
    "--values",
    str(CHART / "profiles" / "cpu.yaml"),
    f"--set=experiment.overrides.total_train_steps={STEPS}",
    r"--set=experiment.overrides.recover\.freq_steps=3",
    r"--set=experiment.overrides.warm_start\.steps=60",
)


def status_of(cluster: Cluster) -> dict[str, Any]:
    """What the status API says; nothing while the controller is away."""
    try:
        found: dict[str, Any] = json.loads(
            cluster.kubectl("exec", "headway-rollout-controller-0", "--", "python", "-c", ASK)
        )
    except CalledProcessError:
        return {}
    return found


def status_when(cluster: Cluster, what: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first status of which something holds."""
    deadline, status = time.monotonic() + DEADLINE_S, status_of(cluster)
    while not (status and holds(status)):
        assert time.monotonic() < deadline, f"{what} has not come; the status is {status}"
        time.sleep(1.0)
        status = status_of(cluster)
    return status


def step_of(status: dict[str, Any]) -> int:
    """Steps that made the published version; -1: nothing is published."""
    label = status["published_version"]
    return int(label.rpartition(".")[2]) if label else -1


@pytest.mark.slow
@pytest.mark.timeout(3 * DEADLINE_S)
@pytest.mark.parametrize("nodes", [1, 2])
def test_pods_train_to_the_end_and_an_upgrade_on_the_way_loses_nothing(nodes: int) -> None:
    if "HEADWAY_HELM_PODS" not in os.environ:
        pytest.skip("HEADWAY_HELM_PODS does not say where the nodes find the images")
    with new_namespace("3") as cluster:
        trainer = f"--set=trainer.replicas={nodes},experiment.overrides.allocation_mode=sglang:d2+d{nodes}"
        train_and_upgrade(cluster, (*RUN, trainer, *os.environ["HEADWAY_HELM_PODS"].split()))


def train_and_upgrade(cluster: Cluster, here: tuple[str, ...]) -> None:
    cluster.helm("install", "headway", str(CHART), *here)
    status_when(cluster, "step 5", lambda status: step_of(status) >= 5)
    cluster.kubectl("wait", "pods", "--all", "--for=condition=ready", f"--timeout={DEADLINE_S:g}s")
    cluster.helm("test", "headway")

    cluster.helm("upgrade", "headway", str(CHART), *here, r"--set=experiment.overrides.rollout\.queue_size=2000")
    end = status_when(cluster, f"step {STEPS}", lambda status: step_of(status) == STEPS)
    assert end["published_version"] == f"v2.{STEPS}"
    end = status_when(cluster, "the last commit", lambda status: status["tasks"]["leased"] == 0)
    assert end["tasks"]["is_conserved"]
    assert end["tasks"]["consumed"] == STEPS * BATCH
    assert end["tasks"]["quarantined"] == 0
    for kind in ("deployment", "statefulset"):
        names = cluster.get(kind)
        for name in names:
            cluster.kubectl("rollout", "status", f"{kind}/{name}", f"--timeout={DEADLINE_S:g}s")

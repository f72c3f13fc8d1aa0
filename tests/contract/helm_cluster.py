"""A namespace in the cluster of KUBECONFIG, for tests of the chart."""

import json
import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helm_chart import helm, helm_of

DEADLINE_S = 120.0


class Cluster:
    """A namespace of its own in the cluster of KUBECONFIG, seen with the tools of one Helm version."""

    def __init__(self, major: str) -> None:
        self.namespace = f"headway-{uuid.uuid4().hex[:8]}"
        self._major = major
        self._kubectl = str(Path(helm_of(major)).with_name("kubectl"))

    def helm(self, *arguments: str) -> str:
        return helm(*arguments, "--namespace", self.namespace, major=self._major).stdout

    def kubectl(self, *arguments: str, check: bool = True) -> str:
        command = [self._kubectl, "--namespace", self.namespace, *arguments]
        return subprocess.run(command, check=check, capture_output=True, text=True).stdout

    def get(self, kinds: str) -> dict[str, Any]:
        """Objects of the release by name."""
        found = json.loads(self.kubectl("get", kinds, "-l", "app.kubernetes.io/name=headway", "-o", "json"))["items"]
        return {one["metadata"]["name"]: one for one in found}

    def wait_for(self, what: str, condition: Any) -> None:
        """The controllers of the cluster act when they get to it."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"no {what} within {DEADLINE_S:g} s"
            time.sleep(0.1)


@contextmanager
def new_namespace(major: str) -> Iterator[Cluster]:
    """A namespace that goes again with what is in it; the test is skipped where there is no cluster."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG names no cluster")
    made = Cluster(major)
    try:
        made.kubectl("get", "--raw", "/readyz")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no cluster is reachable: {error.stderr.strip().splitlines()[-1]}")
    made.kubectl("create", "namespace", made.namespace)
    try:
        yield made
    finally:
        made.kubectl("delete", "namespace", made.namespace, "--wait=false", check=False)

"""Helm and the chart, for tests: which helms there are, and what the chart renders."""

import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "headway"
PROFILES = sorted((CHART / "profiles").glob("*.yaml"))
MAJORS = ("3", "4")

Object = dict[str, Any]


def helm_of(major: str) -> str:
    """The helm of a major version; the test is skipped where there is none."""
    program = ROOT / ".cache" / "helm" / major / "helm"
    if not program.exists():
        pytest.skip(f"no Helm {major} in .cache/helm: `make test-helm` fetches it")
    return str(program)


def helm(*arguments: str, major: str = "3", check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run helm; with `check` it has to succeed."""
    done = subprocess.run([helm_of(major), *arguments], capture_output=True, text=True, cwd=ROOT)
    assert not check or done.returncode == 0, done.stderr
    return done


@cache
def rendered(*arguments: str, major: str = "3") -> list[Object]:
    """The objects that `helm template headway` makes."""
    made = helm("template", "headway", str(CHART), "--namespace", "test", *arguments, major=major).stdout
    return [found for found in yaml.safe_load_all(made) if found]


def profile(path: Path) -> list[Object]:
    """The objects of a profile."""
    return rendered("--values", str(path))


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    """The objects of some kinds."""
    return [found for found in objects if found["kind"] in kinds]


def named(objects: list[Object], kind: str, name: str) -> Object:
    """The one object of a kind and a name, without the release's part of it."""
    return next(found for found in of_kind(objects, kind) if found["metadata"]["name"] == f"headway-{name}")


def pods(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """(component, the pod's labels and spec) of every pod, `helm test`'s too."""
    for found in objects:
        template = found["spec"]["template"] if found["kind"] in ("Deployment", "StatefulSet") else found
        if "containers" in template.get("spec", {}):
            yield template["metadata"]["labels"]["app.kubernetes.io/component"], template


def container(objects: list[Object], component: str) -> Object:
    """The one container of a component's pod."""
    only: Object
    (only,) = dict(pods(objects))[component]["spec"]["containers"]
    return only

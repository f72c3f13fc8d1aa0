"""What is said of the containers is so: every variable has its default told, and the reward image needs no torch."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(ROOT.glob("docker-compose*.yml"))


def test_every_variable_is_told_with_its_default() -> None:
    text = "\n".join(line for file in FILES for line in file.read_text().splitlines() if not line.startswith("#"))
    used = dict(re.findall(r"\$\{([A-Z_]+):-([^}]*)\}", text))
    assert set(re.findall(r"\$\{?([A-Z_]+)", text)) == set(used), "a variable without a default"
    told = dict(re.findall(r"^#([A-Z_]+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert told == used


def test_one_variable_has_one_default() -> None:
    text = "\n".join(file.read_text() for file in FILES)
    defaults: dict[str, set[str]] = {}
    for name, default in re.findall(r"\$\{([A-Z_]+):-([^}]*)\}", text):
        defaults.setdefault(name, set()).add(default)
    assert {name: found for name, found in defaults.items() if len(found) > 1} == {}


@pytest.mark.parametrize("service", ["name-resolve", "reward", "rollout-controller", "container"])
def test_only_inference_and_trainer_require_torch(service: str) -> None:
    found = requirements(service)
    assert not [line for line in found if line.startswith("torch")]
    assert "grpcio>=1.80" in found


def test_an_extra_that_names_others_is_followed() -> None:
    assert set(requirements("reward")) < set(requirements("local"))


def requirements(*extras: str) -> list[str]:
    words = [sys.executable, str(ROOT / "docker/requirements.py"), str(ROOT / "pyproject.toml"), *extras]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()

"""Render the chart with each of its profiles into helm/rendered: `helm_render.py [--check] [HELM]`.

What a change of the chart does to a cluster is then seen in the change itself. Objects are sorted and written in one
style, so that every Helm writes the same.
"""

import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "helm" / "headway"
RENDERED = ROOT / "helm" / "rendered"
KUBERNETES = "1.34.0"
PLACEHOLDER = "# Here stands the experiment file: word for word."
"""So that a change of configs/ is no change of what is rendered."""


def render(helm: str, profile: Path) -> str:
    """What `helm install headway` with a profile would send to a new cluster.

    Raises:
        CalledProcessError: Helm refuses it.
    """
    where = ["--namespace", "headway", "--kube-version", KUBERNETES, "--set", f"experiment.content={PLACEHOLDER}"]
    command = [helm, "template", "headway", str(CHART), "--values", str(profile), *where]
    made = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    objects = [found for found in yaml.safe_load_all(made) if found]
    objects.sort(key=lambda found: (found["kind"], found["metadata"]["name"]))
    return yaml.safe_dump_all(objects, sort_keys=False, width=120)


def main(arguments: list[str]) -> int:
    """Write what is rendered, or with --check tell what has changed."""
    helm = next((one for one in arguments if not one.startswith("-")), ".cache/helm/3/helm")
    stale = []
    for profile in sorted((CHART / "profiles").glob("*.yaml")):
        target, made = RENDERED / profile.name, render(helm, profile)
        if "--check" not in arguments:
            target.parent.mkdir(exist_ok=True)
            target.write_text(made, encoding="utf-8")
        elif not target.exists() or target.read_text(encoding="utf-8") != made:
            stale.append(str(target.relative_to(ROOT)))
    if stale:
        print(f"{', '.join(stale)}: not what the chart renders; run `make helm`", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

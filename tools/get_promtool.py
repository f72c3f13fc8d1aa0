"""Where `promtool` is, which checks and tests Prometheus' rules: `get_promtool.py [FOLDER]`, default .cache/promtool.

The one on PATH; else the one in the folder, which is taken out of Debian's package `prometheus` when it is not there.
Root is not needed, and nothing is installed.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "promtool"
PATIENCE_S = 120.0


def promtool(folder: Path = FOLDER) -> str:
    """Its path.

    Raises:
        LookupError: It is not here, and cannot be fetched; the message says why.
    """
    if found := shutil.which("promtool"):
        return found
    program = folder / "usr" / "bin" / "promtool"
    if not program.is_file():
        fetch(folder)
    return str(program)


def fetch(folder: Path) -> None:
    """Unpack Debian's package into a folder.

    Raises:
        LookupError: It cannot be had.
    """
    try:
        with tempfile.TemporaryDirectory() as download:
            run("apt-get", "download", "prometheus", folder=Path(download))
            (package,) = Path(download).glob("*.deb")
            folder.mkdir(parents=True, exist_ok=True)
            run("dpkg", "--extract", str(package), str(folder), folder=folder)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise LookupError(
            f"promtool is not on PATH, and Debian's package prometheus cannot be fetched: {error}"
        ) from error


def run(*words: str, folder: Path) -> None:
    subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=PATIENCE_S)


if __name__ == "__main__":
    print(promtool(*map(Path, sys.argv[1:2])))

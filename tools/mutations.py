"""Take each guard out by hand, and see that a test fails: a guard that nothing misses is not tested.

    python tools/mutations.py [words of a guard ...]

Reads tests/mutations/*.toml. Each mutation is made in a copy of the tree, never in the tree itself; its tests then
run there, and the first that fails is the proof. Ends with 1 when a mutation survives, or does not apply any more.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("headway", "services", "tests", "examples", "configs", "pyproject.toml")
LIMIT_S = 300


@dataclass(frozen=True)
class Mutation:
    """One guard, and what is left when it is taken out."""

    guard: str
    file: str
    before: str
    after: str
    tests: list[str]

    def apply(self, root: Path) -> str:
        """Write the mutated file below `root`; returns the original text.

        Raises:
            ValueError: The guard is not there exactly once.
        """
        path = root / self.file
        text = path.read_text()
        if text.count(self.before) != 1:
            raise ValueError(f"{self.file} has the text {text.count(self.before)} times, not once")
        path.write_text(text.replace(self.before, self.after))
        return text


def main(words: list[str]) -> int:
    """Try all mutations whose guard has all the words; the number that survived, at most 1."""
    chosen = [mutation for mutation in read_mutations() if all(word in mutation.guard for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copy_tree(root)
        survived = [mutation for mutation in chosen if not is_caught(mutation, root)]
    print(f"{len(chosen) - len(survived)} of {len(chosen)} mutations are caught")
    return int(bool(survived))


def read_mutations() -> list[Mutation]:
    files = sorted((ROOT / "tests/mutations").glob("*.toml"))
    return [Mutation(**entry) for file in files for entry in tomllib.loads(file.read_text())["mutation"]]


def copy_tree(root: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, root / name)


def is_caught(mutation: Mutation, root: Path) -> bool:
    """Whether a test fails without the guard; says so."""
    try:
        original = mutation.apply(root)
    except ValueError as error:
        print(f"STALE     {mutation.guard}: {error}", flush=True)
        return False
    try:
        failed = first_failure(mutation.tests, root)
    finally:
        (root / mutation.file).write_text(original)
    print(f"{'caught' if failed else 'SURVIVED':9} {mutation.guard}  {failed}", flush=True)
    return bool(failed)


def first_failure(tests: list[str], root: Path) -> str:
    """The name of the first test that fails; empty when all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return "(no end)"
    lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "" if run.returncode == 0 else (lines or ["(the run ended by itself)"])[0].split(" - ")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

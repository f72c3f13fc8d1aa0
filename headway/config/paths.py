"""Where a run's files are: `{fileroot}/{kind}/{user}/{experiment_name}/{trial_name}`, AReaL's layout.

The user is HEADWAY_USER, else the name of the account, else its number, so that containers without a passwd entry
agree.
"""

import getpass
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunPaths:
    """Folders of one trial. None is made here: who writes makes it."""

    run: Path
    """The resolved configuration, sockets, the report."""
    logs: Path
    """Log files of the services, `stats.jsonl`, TensorBoard."""
    weights: Path
    """Published versions: `v{term}.{step}/`."""
    checkpoints: Path
    """Exports of the model by `saver`."""
    recover: Path
    """Checkpoints from which a run continues."""
    rollouts: Path
    """Dumped groups: `{version}/*.jsonl`."""
    eval_rollouts: Path
    """Dumped evaluations: `{version}/*.jsonl`."""
    journal: Path
    """The rollout controller's journal."""
    traces: Path
    """Chrome traces and `sessions.jsonl`."""


def user_name() -> str:
    """The part of every path that keeps people apart."""
    if name := os.environ.get("HEADWAY_USER"):
        return name
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())

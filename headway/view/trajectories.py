"""One sample with its tokens: the line of the dump, the text of each token, and what the trainer made of it."""

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import NotFound
from headway.view.folder import SAMPLES, TRAINED
from headway.view.lines import line_at
from headway.view.models import Trained, Trajectory
from headway.view.pieces import Pieces

TAKEN_OVER = ("prompt_len", "metrics", "token_ids", "logprobs", "versions", "loss_mask")


@dataclass(frozen=True, slots=True)
class Address:
    """Which sample. Without kind, step and attempt: of the newest group of the task."""

    task_id: str
    sample: int
    kind: str | None = None
    step: int | None = None
    attempt: int | None = None


def trajectory(
    connection: sqlite3.Connection, roots: Mapping[str, Path], pieces: Pieces, address: Address
) -> Trajectory:
    """The sample.

    Raises:
        NotFound: There is none, or its file is gone.
    """
    row = _row(connection, address)
    line = _line(roots[row["kind"]] / str(row["step"]) / SAMPLES, row)
    names = {name for name in Trajectory.model_fields if name in row.keys()}  # noqa: SIM118 - a Row is no mapping
    found: dict[str, Any] = {name: row[name] for name in names} | {name: line[name] for name in TAKEN_OVER}
    return Trajectory(
        **found,
        pieces=pieces.of(line["token_ids"]),
        text=line["prompt"] + line["completion"],
        trained=_trained(connection, roots["train"], row, line["logprobs"]),
    )


def _row(connection: sqlite3.Connection, address: Address) -> sqlite3.Row:
    conditions, parameters = ["task_id = ?", "sample = ?"], [address.task_id, address.sample]
    for name in ("kind", "step", "attempt"):
        if (value := getattr(address, name)) is not None:
            conditions.append(f"{name} = ?")
            parameters.append(value)
    row = connection.execute(
        f"""SELECT s.*, g.kind, g.step, g.task_id, g.attempt, g.outcome, g.consumed_step
            FROM groups g JOIN samples s ON s.group_id = g.id
            WHERE {" AND ".join(conditions)} ORDER BY g.id DESC LIMIT 1""",
        parameters,
    ).fetchone()
    if row is None:
        raise NotFound(f"sample {address.sample} of task {address.task_id} is in no dump")
    found: sqlite3.Row = row
    return found


def _line(path: Path, row: sqlite3.Row) -> dict[str, Any]:
    try:
        return line_at(path, row["offset"], row["size"])
    except (OSError, ValueError) as error:
        raise NotFound(f"{path} no longer holds what the index says of it: {error}") from error


def _trained(
    connection: sqlite3.Connection, root: Path, row: sqlite3.Row, logprobs: Sequence[float | None]
) -> Trained | None:
    if row["kind"] != "train" or row["consumed_step"] is None:
        return None
    place = connection.execute(
        "SELECT offset, size FROM trained WHERE task_id = ? AND sample = ? AND step = ?",
        (row["task_id"], row["sample"], row["consumed_step"]),
    ).fetchone()
    if place is None:
        return None
    line = _line(root / str(row["consumed_step"]) / TRAINED, place)
    return trained_of(line, logprobs)


def trained_of(line: Mapping[str, Any], logprobs: Sequence[float | None]) -> Trained:
    """What a line of the trainer says, an entry for every token of the sample."""
    gap: list[None] = [None] * line["start"]
    now = line["prox_logp"] or line["logp"]
    divergence = [
        a - b if a is not None and b is not None and kept else None
        for a, b, kept in zip(now, logprobs[line["start"] :], line["loss_mask"], strict=True)
    ]
    return Trained(
        step=line["step"],
        reward=line["reward"],
        loss_mask=[False] * line["start"] + [bool(kept) for kept in line["loss_mask"]],
        advantages=[*gap, *line["advantages"]],
        prox_logp=[*gap, *line["prox_logp"]] if line["prox_logp"] else None,
        logp=[*gap, *line["logp"]],
        divergence=[*gap, *divergence],
    )

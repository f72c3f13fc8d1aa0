"""Find groups: filters, order and pages over the index.

A page begins behind a place, (value of the sort, id), not at a number: groups that come meanwhile neither repeat nor
hide one.
"""

import base64
import binascii
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from headway.errors import InvalidInput
from headway.view.models import Group, Sample, SampledGroup
from headway.view.schema import SORTS

COLUMNS = ", ".join(Group.model_fields)
SAMPLE_COLUMNS = ", ".join(Sample.model_fields)


@dataclass(frozen=True, slots=True)
class Filters:
    """What a group must be like; None: anything. Bounds are inclusive."""

    kind: str | None = None
    outcome: str | None = None
    search: str | None = None
    """Occurs in the prompt's beginning, or begins the task's id."""
    min_reward: float | None = None
    max_reward: float | None = None
    min_length: float | None = None
    max_length: float | None = None
    min_staleness: int | None = None
    max_staleness: int | None = None
    min_step: int | None = None
    max_step: int | None = None

    def conditions(self) -> Iterator[tuple[str, list[Any]]]:
        """SQL and its parameters."""
        for name in ("kind", "outcome"):
            if (value := getattr(self, name)) is not None:
                yield f"{name} = ?", [value]
        for name in SORTS:
            for side, sign in (("min", ">="), ("max", "<=")):
                if (value := getattr(self, f"{side}_{name}")) is not None:
                    yield f"{name} {sign} ?", [value]
        if self.search:
            yield "(instr(lower(prompt), lower(?)) OR instr(task_id, ?) = 1)", [self.search, self.search]


@dataclass(frozen=True, slots=True)
class Order:
    """By what groups are sorted; equal ones by age."""

    sort: str = "step"
    is_ascending: bool = False

    def beyond(self, cursor: str | None) -> Iterator[tuple[str, list[Any]]]:
        """What lies behind a cursor.

        Raises:
            InvalidInput: It is not one of this order.
        """
        if cursor is not None:
            sign = ">" if self.is_ascending else "<"
            yield f"({SORTS[self.sort]}, id) {sign} (?, ?)", self._place(cursor)

    def clause(self) -> str:
        direction = "ASC" if self.is_ascending else "DESC"
        return f"ORDER BY {SORTS[self.sort]} {direction}, id {direction}"

    def cursor(self, row: sqlite3.Row) -> str:
        """The place of a row."""
        return base64.urlsafe_b64encode(orjson.dumps([self.sort, row["place"], row["id"]])).decode()

    def _place(self, cursor: str) -> list[Any]:
        try:
            sort, place, number = orjson.loads(base64.urlsafe_b64decode(cursor))
            found = [float(place), float(number)]
        except (binascii.Error, ValueError, TypeError) as error:
            raise InvalidInput(f"cursor {cursor!r} is not one that a page gave") from error
        if sort != self.sort:
            raise InvalidInput(f"cursor {cursor!r} belongs to pages sorted by {sort}, not by {self.sort}")
        return found


def find(
    connection: sqlite3.Connection, filters: Filters, order: Order, limit: int, cursor: str | None = None
) -> tuple[list[Group], str | None]:
    """A page of groups, and the cursor of the next one; None: it was the last."""
    where, parameters = _where([*filters.conditions(), *order.beyond(cursor)])
    found = connection.execute(
        f"SELECT id, {SORTS[order.sort]} AS place, {COLUMNS} FROM groups {where} {order.clause()} LIMIT ?",
        [*parameters, limit + 1],
    ).fetchall()
    return [_group(row) for row in found[:limit]], order.cursor(found[limit - 1]) if len(found) > limit else None


def count(connection: sqlite3.Connection, filters: Filters) -> int:
    """Groups that pass."""
    where, parameters = _where(list(filters.conditions()))
    return int(connection.execute(f"SELECT count(*) FROM groups {where}", parameters).fetchone()[0])


def groups_of_task(connection: sqlite3.Connection, task_id: str) -> list[SampledGroup]:
    """Every group of a task, newest first."""
    rows = connection.execute(f"SELECT id, {COLUMNS} FROM groups WHERE task_id = ? ORDER BY id DESC", (task_id,))
    return [
        SampledGroup(**_group(row).model_dump(), samples=_samples(connection, row["id"])) for row in rows.fetchall()
    ]


def _samples(connection: sqlite3.Connection, group_id: int) -> list[Sample]:
    rows = connection.execute(f"SELECT {SAMPLE_COLUMNS} FROM samples WHERE group_id = ? ORDER BY sample", (group_id,))
    return [Sample(**dict(row)) for row in rows]


def _group(row: sqlite3.Row) -> Group:
    return Group(**{name: row[name] for name in Group.model_fields})


def _where(conditions: list[tuple[str, list[Any]]]) -> tuple[str, list[Any]]:
    parameters = [value for _, values in conditions for value in values]
    return ("WHERE " + " AND ".join(how for how, _ in conditions) if conditions else "", parameters)

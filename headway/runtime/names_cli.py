"""`headway names` and `headway versions`: what is registered and published, of running and of dead runs, for people."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import typer

from headway.runtime.names import Entry, NameClient, NameEvent, Put, Removed, Snapshot, VersionRecord

T = TypeVar("T")
names_app = typer.Typer(help="Look at what is registered, and clear what dead runs left.", no_args_is_help=True)

Address = Annotated[
    str,
    typer.Option(
        "--name-resolve",
        envvar="HEADWAY_NAME_RESOLVE",
        help="host:port[,host:port] of name-resolve.",
        show_default=False,
    ),
]
Prefix = Annotated[str, typer.Argument(help="experiment/trial, or any part of a name; empty: everything.")]
Json = Annotated[bool, typer.Option("--json", help="As JSON, one object a line.")]


@names_app.command("ls")
def list_names(address: Address, prefix: Prefix = "", as_json: Json = False) -> None:
    """List the names at and below a prefix, with their age; `kept` names lapse when their owner dies."""
    entries = _ask(address, lambda names: names.list(prefix))
    if as_json:
        for entry in entries:
            typer.echo(json.dumps(asdict(entry)))
        return
    rows = [(entry.name, entry.value, _age(entry.registered_at), _life(entry), _pairs(entry)) for entry in entries]
    _show(("NAME", "VALUE", "AGE", "LIFE", "METADATA"), rows)


@names_app.command("get")
def get_name(address: Address, name: Annotated[str, typer.Argument(help="The whole name.")]) -> None:
    """Print the value of one name."""
    typer.echo(_ask(address, lambda names: names.get(name)).value)


@names_app.command("watch")
def watch_names(address: Address, prefix: Prefix = "") -> None:
    """Print what is there, then every change as it happens, until interrupted."""

    async def follow(names: NameClient) -> None:
        async with aclosing(names.watch(prefix)) as events:
            async for event in events:
                for line in _lines(event):
                    typer.echo(line)

    _ask(address, follow)


@names_app.command("clear")
def clear_names(
    address: Address,
    prefix: Annotated[str, typer.Argument(help="experiment/trial, or any part of a name.")],
    versions: Annotated[bool, typer.Option("--versions", help="Also forget the published versions.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a prefix and everything below it. Terms are kept, so that no version is ever used twice."""
    entries = _ask(address, lambda names: names.list(prefix))
    num_kept = sum(bool(entry.lease_id) for entry in entries)
    alive = f", {num_kept} of them kept alive by running processes" if num_kept else ""
    if not yes:
        typer.confirm(f"Delete {len(entries)} names at {prefix}{alive}?", abort=True)
    num_removed = _ask(address, lambda names: names.clear(prefix, with_versions=versions))
    typer.echo(f"{num_removed} deleted")


def versions(address: Address, prefix: Prefix = "", as_json: Json = False) -> None:
    """Show the published version of every run at or below a prefix."""
    records = _ask(address, lambda names: names.list_versions(prefix))
    if as_json:
        for record in records:
            typer.echo(json.dumps({**asdict(record), "version": record.version.label}))
        return
    _show(("RUN", "VERSION", "AGE", "PUBLICATIONS", "TOKEN", "MANIFEST"), [_version_row(record) for record in records])


def _ask(address: str, question: Callable[[NameClient], Awaitable[T]]) -> T:
    async def ask() -> T:
        async with NameClient(address) as names:
            return await question(names)

    try:
        return asyncio.run(ask())
    except KeyboardInterrupt:
        raise typer.Exit from None


def _lines(event: NameEvent) -> list[str]:
    if isinstance(event, Snapshot):
        return [f"= {entry.name} {entry.value}" for entry in event.entries]
    if isinstance(event, Put):
        return [f"+ {event.entry.name} {event.entry.value}"]
    assert isinstance(event, Removed)
    return [f"- {event.name}"]


def _life(entry: Entry) -> str:
    return "kept" if entry.lease_id else "stays"


def _pairs(entry: Entry) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(entry.metadata.items()))


def _version_row(record: VersionRecord) -> tuple[Any, ...]:
    manifest = record.manifest_sha256[:12]
    return record.run, record.version.label, _age(record.published_at), record.sequence, record.fencing_token, manifest


def _age(since: float) -> str:
    """How long ago a moment was, in its largest unit.

    Example:
        >>> _age(time.time() - 7300)
        '2h'
    """
    age_s = max(0, int(time.time() - since))
    for unit, length_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if age_s >= length_s:
            return f"{age_s // length_s}{unit}"
    return f"{age_s}s"


def _show(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print columns."""
    table = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    for row in table:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

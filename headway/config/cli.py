"""`headway config`: check an experiment file, show it, describe it, compare two."""

from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console

from headway.config.loading import read_experiment, require_runnable
from headway.config.schema import json_schema
from headway.config.show import differences, inline, shown_config

config_app = typer.Typer(help="Check, show and compare experiment files.", no_args_is_help=True)
EXIT_BAD = 2
STYLES = {"ok": "green", "note": "yellow", "bad": "bold red"}

File = Annotated[Path, typer.Argument(help="The experiment file.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(help="a.b=c, overrides of the file.", show_default=False)]


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True, markup=False)


@config_app.command()
def check(
    file: File,
    overrides: Overrides = None,
    only_file: Annotated[bool, typer.Option("--only-file", help="Check the file alone, and try nothing.")] = False,
) -> None:
    """Find everything that is wrong before anything is started: in the file, and by trying what it names."""
    experiment = read_experiment(file, overrides or [])
    console = _console()
    for note in experiment.notes:
        _tell(console, "note", "file", note)
    require_runnable(experiment.config)
    is_bad = False
    if not only_file:
        from headway.config.dry_run import dry_run

        for finding in dry_run(experiment.config):
            _tell(console, finding.status, finding.what, finding.text)
            is_bad |= finding.status == "bad"
    if is_bad:
        raise typer.Exit(EXIT_BAD)
    console.print(f"{file}: fine")


def _tell(console: Console, status: str, what: str, text: str) -> None:
    console.print(f"{status:4} ", style=STYLES[status], end="")
    console.print(f"{what}: {text}")


@config_app.command()
def show(file: File, overrides: Overrides = None) -> None:
    """Print the file resolved, secrets masked, with what it does not set dimmed."""
    experiment = read_experiment(file, overrides or [])
    _console().print(shown_config(experiment.config, experiment.given), end="")


@config_app.command()
def schema() -> None:
    """Print the JSON Schema of the file, for editors."""
    print(orjson.dumps(json_schema(), option=orjson.OPT_INDENT_2).decode())


@config_app.command()
def diff(file: File, other: Annotated[Path, typer.Argument(help="Another one.", show_default=False)]) -> None:
    """Print every key in which two files differ once they are resolved. Exit code 1: they do."""
    console = _console()
    found = differences(read_experiment(file).config, read_experiment(other).config)
    for key, mine, others in found:
        console.print(f"{key}:", style="bold")
        console.print(f"  - {inline(mine)}", style="red")
        console.print(f"  + {inline(others)}", style="green")
    if found:
        raise typer.Exit(1)

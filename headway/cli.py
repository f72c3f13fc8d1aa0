"""The `headway` command."""

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headway.config.cli import config_app
from headway.errors import HeadwayError
from headway.runtime.names_cli import names_app, versions
from services.trainer.sft import sft

app = typer.Typer(
    help="Asynchronous reinforcement learning for language models, run as services.", no_args_is_help=True
)
app.add_typer(config_app, name="config")
app.add_typer(names_app, name="names")
app.command()(versions)
app.command()(sft)
EXIT_MISTAKE = 2
DEFAULT_URL = "http://127.0.0.1:8470"

File = Annotated[Path, typer.Argument(help="The experiment file.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(help="a.b=c, overrides of the file.", show_default=False)]


@app.command()
def up(file: File, overrides: Overrides = None) -> None:
    """Start everything on this machine, train to the end, write a report."""
    from headway.config import read_experiment, require_runnable
    from headway.launcher.plan import Launch
    from headway.launcher.up import EXIT_INTERRUPTED, Interrupted
    from headway.launcher.up import up as run

    console = Console(highlight=False, soft_wrap=True)
    experiment = read_experiment(file, overrides or [])
    require_runnable(experiment.config)
    for note in experiment.notes:
        console.print(f"note: {note}", style="yellow", markup=False)
    launch = Launch(experiment.config, file, overrides or [])
    try:
        asyncio.run(run(launch, console))
    except Interrupted:
        console.print("interrupted; every process has ended")
        raise typer.Exit(EXIT_INTERRUPTED) from None


@app.command()
def status(url: Annotated[str, typer.Argument(help="The controller's address.")] = DEFAULT_URL) -> None:
    """Ask a running controller how things stand."""
    from headway.launcher.progress import status_text
    from headway.launcher.rest import fetch

    print(status_text(asyncio.run(fetch(f"{url}/v1/status"))))


@app.command()
def view(
    run_dir: Annotated[Path, typer.Argument(help="The run's folder: {fileroot}/run/{user}/{experiment}/{trial}.")],
    port: Annotated[int, typer.Option(help="The port of this machine to serve at; 0: any free one.")] = 8471,
) -> None:
    """Show a run that is over in the browser: the dashboard, and its trajectories."""
    from headway.view.app import serve
    from headway.view.folder import RunFolder

    folder = RunFolder.at(run_dir)

    def tell(url: str) -> None:
        print(f"{folder.name}: {url}   (Ctrl-C ends it)", flush=True)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(folder, port, tell))


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="The controller's address.")] = DEFAULT_URL,
    once: Annotated[bool, typer.Option(help="Print one frame, and end.")] = False,
) -> None:
    """Watch a run in this terminal."""
    from headway.launcher.top import top as show

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(show(url.rstrip("/"), Console(highlight=False), once))


@app.command()
def doctor(
    source: Annotated[str, typer.Argument(help="The controller's address, or the folder of a run.")] = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Name what slows a run down or spoils it, and the key that changes it. Exit code 1: there is a problem."""
    import json

    from headway.doctor import Severity, diagnose
    from headway.launcher import doctor as launcher

    evidence = asyncio.run(launcher.evidence_of(source))
    findings = diagnose(evidence)
    if as_json:
        print(json.dumps(launcher.as_json(findings), indent=2))
    else:
        launcher.show(evidence, findings, Console(highlight=False, soft_wrap=True))
    raise typer.Exit(int(any(one.severity is Severity.PROBLEM for one in findings)))


@app.command()
def plan(
    file: File,
    tokens_per_s: Annotated[float, typer.Option(help="Generated for one request among all that run.", min=0.001)],
    mean_tokens: Annotated[float, typer.Option(help="Generated for one sample.", min=1.0)],
    train_s: Annotated[float, typer.Option(help="Seconds of one train step.", min=0.001)],
    sigma: Annotated[float, typer.Option(help="Spread of the lengths, log-normal; 0: all equal.", min=0.0)] = 0.8,
    load_s: Annotated[float, typer.Option(help="Seconds for which engines pause to take a version.", min=0.0)] = 0.0,
    overrides: Overrides = None,
) -> None:
    """Foretell speed and lost tokens for each staleness bound, with the real controller in virtual time."""
    from headway.config import read_experiment
    from services.rollout_controller.plan_command import print_plan
    from services.rollout_controller.planning import Speeds

    config = read_experiment(file, overrides or []).config
    print_plan(config, Speeds(tokens_per_s, mean_tokens, sigma, train_s, load_s), Console(highlight=False))


def main() -> None:
    """Run the command; a mistake ends in one clear line."""
    try:
        app()
    except HeadwayError as error:
        print(f"headway: {error}", file=sys.stderr)
        sys.exit(EXIT_MISTAKE)

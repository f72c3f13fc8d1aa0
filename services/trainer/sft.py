"""`headway sft`, or `python -m services.trainer.sft`: supervised fine-tuning on the trainer's engine.

Rows are those of `train_dataset` that have an answer, settings those of `warm_start`. Under torchrun, with the number
of ranks that `allocation_mode` gives the trainer, each rank runs this command. Importing this module loads no torch.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from headway.errors import HeadwayError

EXIT_MISTAKE = 2
File = Annotated[Path, typer.Argument(help="The experiment file.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(help="a.b=c, overrides of the file.", show_default=False)]
Output = Annotated[Path | None, typer.Option(help="Folder for the model. Default: `sft` below the run's checkpoints.")]


def sft(file: File, overrides: Overrides = None, output: Output = None) -> None:
    """Fine-tune the model on rows with answers; write a folder that `actor.path` and `from_pretrained` take."""
    from headway.config import load_experiment
    from headway.runtime.logs import configure_logging
    from services.trainer.fine_tuning import fine_tune

    configure_logging("sft", "0")
    fine_tune(load_experiment(file, overrides or []), output)


def main() -> None:
    """Run the command; a mistake ends in one clear line."""
    try:
        typer.run(sft)
    except HeadwayError as error:
        print(f"headway sft: {error}", file=sys.stderr)
        sys.exit(EXIT_MISTAKE)


if __name__ == "__main__":
    main()

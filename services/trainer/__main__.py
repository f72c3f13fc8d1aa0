"""`python -m services.trainer`: the trainer as a process, or as one rank under torchrun."""

from headway.runtime.service import main
from services.trainer.app import run

if __name__ == "__main__":
    main("trainer", run)

"""`python -m services.inference`: the agent and its engine as a process."""

from headway.runtime.service import main
from services.inference.app import run

if __name__ == "__main__":
    main("inference", run)

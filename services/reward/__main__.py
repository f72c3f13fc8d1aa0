"""`python -m services.reward`: the reward service as a process."""

from headway.runtime.service import main
from services.reward.app import run

if __name__ == "__main__":
    main("reward", run)

"""`python -m services.rollout_controller`: see headway/runtime/service.py."""

from headway.runtime.service import main
from services.rollout_controller.app import run

if __name__ == "__main__":
    main("rollout-controller", run)

"""`python -m services.name_resolve`: see headway/runtime/service.py."""

from headway.runtime.service import main
from services.name_resolve.app import run

if __name__ == "__main__":
    main("name-resolve", run)

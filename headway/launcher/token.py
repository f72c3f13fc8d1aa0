"""The token with which people control a run that `headway up` has started: the user's, or one made for the run.

It lies in the run's folder, readable by its owner alone, and is kept when the run goes on:

    curl -X POST -H "Authorization: Bearer $(cat RUN/api_token)" http://127.0.0.1:8470/v1/pause
"""

import os
import secrets
from pathlib import Path

from headway.config.secrets import secret

VARIABLE = "HEADWAY_API_TOKEN"
NAME = "api_token"
NUM_BYTES = 24


def token_file(run: Path) -> Path | None:
    """The file with the run's token; None: the user has given one by the environment."""
    return None if os.environ.get(VARIABLE) or os.environ.get(f"{VARIABLE}_FILE") else run / NAME


def api_token(run: Path) -> str:
    """The token of a run, made where there is none.

    Raises:
        InvalidInput: The file that the environment names cannot be read.
    """
    path = token_file(run)
    if path is None:
        return secret(None, VARIABLE) or ""
    if not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(secrets.token_urlsafe(NUM_BYTES))
    return path.read_text(encoding="utf-8").strip()

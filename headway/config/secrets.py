"""Secrets: from the file, the environment, or a file that the environment names; masked wherever they are shown."""

import os
import re
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from headway.errors import InvalidInput

MASK = "**********"
SECRET_NAME = re.compile(r"(^|_)(api_?key|key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)


def secret(value: SecretStr | None, variable: str) -> str | None:
    """The secret: as given, else the environment's VARIABLE, else what the file VARIABLE_FILE holds, else None.

    Raises:
        InvalidInput: VARIABLE_FILE names a file that cannot be read.
    """
    if value is not None and value.get_secret_value() != MASK:
        return value.get_secret_value()
    if given := os.environ.get(variable):
        return given
    if not (name := os.environ.get(f"{variable}_FILE")):
        return None
    try:
        return Path(name).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise InvalidInput(f"{variable}_FILE: {error}") from None


def masked(value: Any, name: str = "") -> Any:
    """A copy of plain data in which every value whose name says that it is secret is masked."""
    if isinstance(value, dict):
        return {key: masked(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [masked(item, name) for item in value]
    is_secret = bool(SECRET_NAME.search(name)) and isinstance(value, str) and value != ""
    return MASK if is_secret else value


def without_masks(value: Any) -> Any:
    """A copy of plain data without what is masked: a file saved with masks takes its secrets from the environment."""
    if isinstance(value, dict):
        return {key: without_masks(item) for key, item in value.items() if item != MASK}
    return [without_masks(item) for item in value] if isinstance(value, list) else value

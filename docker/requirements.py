"""Print what extras of pyproject.toml require, one a line: `requirements.py PYPROJECT [EXTRA...]`.

So that an image's layer of dependencies is made again when they change, and not with every change of the source.
"""

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

OWN_EXTRAS = re.compile(r"headway\[(?P<extras>[^]]+)]")


def requirements(project: dict[str, Any], extras: Sequence[str]) -> Iterator[str]:
    """The project's own dependencies and those of its extras; extras that name others are followed."""
    yield from project["dependencies"]
    for extra in extras:
        yield from of_extra(project["optional-dependencies"], extra)


def of_extra(known: dict[str, list[str]], extra: str) -> Iterator[str]:
    """The requirements of one extra.

    Raises:
        SystemExit: There is none of that name.
    """
    if extra not in known:
        raise SystemExit(f"pyproject.toml has no extra {extra!r}; it has {', '.join(known)}")
    for requirement in known[extra]:
        if own := OWN_EXTRAS.fullmatch(requirement):
            for other in own["extras"].split(","):
                yield from of_extra(known, other.strip())
        else:
            yield requirement


if __name__ == "__main__":
    settings = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print("\n".join(dict.fromkeys(requirements(settings["project"], sys.argv[2:]))))

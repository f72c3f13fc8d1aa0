"""The dotted keys of the schema, and which one was meant by a key that is not among them."""

import difflib
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from headway.config.section import Section, section_class


@cache
def walk(section: type[Section]) -> tuple[tuple[str, type[Section], FieldInfo], ...]:
    """(dotted key, section, field) of every field below a section; lists of sections appear as `key.0`."""
    found: list[tuple[str, type[Section], FieldInfo]] = []
    for name, field in section.model_fields.items():
        found.append((name, section, field))
        if (inner := section_class(field.annotation)) is not None:
            prefix = f"{name}.0." if "list" in str(field.annotation) else f"{name}."
            found += [(prefix + key, owner, below) for key, owner, below in walk(inner)]
    return tuple(found)


def section_at(root: type[Section], key: str) -> type[Section] | None:
    """The section at a dotted key; the root at the empty one."""
    if not key:
        return root
    field = field_at(root, key)
    return section_class(field.annotation) if field is not None else None


def field_at(root: type[Section], key: str) -> FieldInfo | None:
    """The field of a dotted key; numbers in it are indices of lists."""
    section: type[Section] | None = root
    field: FieldInfo | None = None
    for part in key.split("."):
        if part.isdigit() and field is not None:
            continue
        field = section.model_fields.get(part) if section is not None else None
        section = section_class(field.annotation) if field is not None else None
    return field


def nearest(root: type[Section], key: str) -> str | None:
    """The known key that was probably meant: a misspelt neighbour, the same word elsewhere, or the closest of all."""
    parent, _, name = key.rpartition(".")
    known = {k: k.rpartition(".") for k, _, _ in walk(root)}
    siblings = {k[2]: full for full, k in known.items() if k[0] == parent}
    if close := difflib.get_close_matches(name, siblings, n=1, cutoff=0.7):
        return siblings[close[0]]
    if same := [full for full, k in known.items() if k[2] == name]:
        return min(same, key=lambda full: (not full.startswith(f"{parent}."), full.count("."), full))
    names = {k[2]: full for full, k in reversed(known.items())}
    if close := difflib.get_close_matches(name, names, n=1, cutoff=0.8):
        return names[close[0]]
    loose = difflib.get_close_matches(name, siblings, n=1, cutoff=0.5)
    return siblings[loose[0]] if loose else None


def value_at(data: Any, key: str) -> tuple[bool, Any]:
    """Whether plain data has the dotted key, and what it holds."""
    for part in key.split("."):
        if isinstance(data, dict) and part in data:
            data = data[part]
        elif isinstance(data, list) and part.isdigit() and int(part) < len(data):
            data = data[int(part)]
        else:
            return False, None
    return True, data

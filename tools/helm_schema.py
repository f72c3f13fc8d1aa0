"""Make values.schema.json from values.yaml: `helm_schema.py [--check] [CHART]`, default helm/headway.

    the type of a default     is the type of its key; a number with a fraction is none of a count
    a key that is not there   is refused, but below `{}`, which is free
    a comment above a key     is its description; `# @schema {...}` adds to what its default says

In a service's block a key without a comment takes those of the first service: what is said once holds for all.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FIRST_SERVICE = "nameResolve"
MARK = "@schema "
QUANTITY = {"type": ["integer", "number", "string"]}
DEFINITIONS: dict[str, Any] = {
    "resources": {
        "type": "object",
        "properties": {
            "requests": {"type": "object", "additionalProperties": QUANTITY},
            "limits": {"type": "object", "additionalProperties": QUANTITY},
        },
        "additionalProperties": False,
    },
    "rollingUpdate": {
        "type": "object",
        "properties": {"maxSurge": QUANTITY, "maxUnavailable": QUANTITY},
        "additionalProperties": False,
    },
    "seccompProfile": {
        "type": "object",
        "properties": {
            "type": {"enum": ["RuntimeDefault", "Localhost"]},
            "localhostProfile": {"type": "string"},
        },
        "required": ["type"],
        "additionalProperties": False,
    },
    "secretKey": {
        "type": "object",
        "properties": {"secret": {"type": "string"}, "key": {"type": "string"}},
        "required": ["secret", "key"],
        "additionalProperties": False,
    },
}
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}

Schema = dict[str, Any]
Comments = dict[tuple[str, ...], tuple[str, Schema]]
"""What stands above a key, by its path: the words, and what `@schema` adds."""


def schema_of(text: str) -> Schema:
    """The JSON schema of a values.yaml."""
    comments = dict(read_comments(text))
    values = yaml.safe_load(text)
    schema = _of(values, (), comments)
    schema["properties"]["global"] = {"type": "object"}  # Helm's own
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema, "$defs": DEFINITIONS}


def read_comments(text: str) -> Iterator[tuple[tuple[str, ...], tuple[str, Schema]]]:
    """(path of a key, (its description, what is added to its schema)) for every key with a comment right above it."""
    lines = text.splitlines()
    for path, line in _keys(yaml.compose(text), ()):
        above: list[str] = []
        while line and lines[line - 1].lstrip().startswith("#"):
            line -= 1
            above.insert(0, lines[line].lstrip().removeprefix("#").strip())
        if above:
            words = " ".join(one for one in above if not one.startswith(MARK))
            marks = [json.loads(one.removeprefix(MARK)) for one in above if one.startswith(MARK)]
            yield path, (words, {name: value for mark in marks for name, value in mark.items()})


def _keys(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    """(path, line) of every key."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, key.value), key.start_mark.line
            yield from _keys(value, (*path, key.value))


def _of(value: Any, path: tuple[str, ...], comments: Comments) -> Schema:
    words, added = comments.get(path) or comments.get((FIRST_SERVICE, *path[1:]), ("", {}))
    schema: Schema = {"description": words} if words else {}
    if "$ref" in added:
        return {**schema, **added}
    if value is not None:
        schema["type"] = TYPES[type(value)]
    if isinstance(value, dict) and value:
        schema["properties"] = {key: _of(item, (*path, key), comments) for key, item in value.items()}
        schema["additionalProperties"] = False
    return {**schema, **added}


def main(arguments: list[str]) -> int:
    """Write the schema, or with --check tell whether it is current."""
    chart = Path(next((one for one in arguments if not one.startswith("-")), "helm/headway"))
    target = chart / "values.schema.json"
    made = json.dumps(schema_of((chart / "values.yaml").read_text(encoding="utf-8")), indent=2) + "\n"
    if "--check" not in arguments:
        target.write_text(made, encoding="utf-8")
        return 0
    if target.exists() and target.read_text(encoding="utf-8") == made:
        return 0
    print(f"{target} is not what {chart}/values.yaml says: run tools/helm_schema.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

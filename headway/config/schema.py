"""The JSON Schema of the experiment file, for editors.

    # yaml-language-server: $schema=headway.schema.json

Every value may also be an interpolation, `${...}`, and older spellings are known, and marked as deprecated.
"""

from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from headway.config.actor import OLD_CAPS, OLD_MODES, ActorConfig
from headway.config.experiment import ExperimentConfig
from headway.config.keys import walk
from headway.config.section import Section, section_class

INTERPOLATION = {"type": "string", "pattern": r"\$\{.+\}"}


def json_schema() -> dict[str, Any]:
    """The schema as plain data."""
    schema = ExperimentConfig.model_json_schema()
    for section in _sections():
        properties = (schema if section is ExperimentConfig else schema["$defs"][section.__name__])["properties"]
        for name in properties:
            properties[name] = _or_interpolation(properties[name])
        for old, new in section.spellings.items():
            properties[old] = {**properties[new], "deprecated": True, "description": f"Another spelling of `{new}`."}
    _add_old_rejection(schema["$defs"][ActorConfig.__name__]["properties"])
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema, "title": "Headway experiment"}


def _sections() -> set[type[Section]]:
    inner = {section_class(field.annotation) for _, _, field in walk(ExperimentConfig)}
    return {ExperimentConfig, *(section for section in inner if section is not None)}


def _or_interpolation(schema: dict[str, Any]) -> dict[str, Any]:
    """The same, or a text with `${...}` in it."""
    if schema.get("type") == "string" and "enum" not in schema:
        return schema
    kept: dict[str, Any] = {key: schema[key] for key in ("description", "default", "deprecated") if key in schema}
    inner = {key: value for key, value in schema.items() if key not in kept}
    return {**kept, "anyOf": [*(inner["anyOf"] if list(inner) == ["anyOf"] else [inner]), INTERPOLATION]}


def _add_old_rejection(properties: dict[str, Any]) -> None:
    text = {"deprecated": True, "description": "Older spelling of `rejection_sampling`."}
    for cap in OLD_CAPS:
        properties[cap] = {
            **text,
            "anyOf": [{"type": "number", "exclusiveMinimum": 1}, {"type": "null"}, INTERPOLATION],
        }
    properties["behave_imp_weight_mode"] = {**text, "enum": [*OLD_MODES, None]}

"""What every section of the experiment file has in common: frozen, strict about keys, forgiving about spelling a type.

The text under a field is its help: editors show it through the JSON Schema, and the docs print it. A field marked
`NullMeans("...")` may be left out or written `null`; what it then holds is said by the mark, and readers always find a
value. A field marked `NoMeaning("...")` is accepted for the sake of AReaL's files, and reported when it is set.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationInfo, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError


@dataclass(frozen=True)
class NullMeans:
    """Marks a field for which `null` stands for something that is worked out at load."""

    meaning: str

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [handler(schema), {"type": "null"}], "x-null-means": self.meaning}


@dataclass(frozen=True)
class NoMeaning:
    """Marks a field that AReaL has and that nothing here can follow."""

    why: str

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "deprecated": True}


class Section(BaseModel):
    """One mapping of the experiment file."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )
    spellings: ClassVar[Mapping[str, str]] = {}
    """Older or newer names of fields, as other versions of AReaL write them."""
    alternatives: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Further groups of keys that say the same thing: only one of a group may be given."""

    @model_validator(mode="before")
    @classmethod
    def _as_written(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        renamed: dict[Any, Any] = {}
        for key, value in data.items():
            name = cls.spellings.get(key, key)
            if value is not None or not cls.null_is_default(name):
                renamed[name] = value
        return renamed

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_not_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and info.field_name is not None:
            kinds = _scalar_kinds(cls.model_fields[info.field_name].annotation)
            if kinds & {int, float} and bool not in kinds:
                raise PydanticCustomError(
                    "bool_for_number", "a number was meant, not {value}", {"value": str(value).lower()}
                )
        return value

    @classmethod
    def doubly_spelt(cls, data: Mapping[str, Any]) -> list[tuple[str, str]]:
        """(key, the other one) of keys that say the same thing and are both given."""
        groups = [*cls.spellings.items(), *cls.alternatives]
        both = [[key for key in group if key in data] for group in groups]
        return [(key, keys[-1]) for keys in both for key in keys[:-1]]

    @classmethod
    def null_is_default(cls, key: Any) -> bool:
        """Whether `null` at this key stands for the default: marked fields, and whole sections."""
        field = cls.model_fields.get(key)
        if field is None:
            return False
        return section_class(field.annotation) is field.annotation or any(
            isinstance(m, NullMeans) for m in field.metadata
        )


def section_class(annotation: Any) -> type[Section] | None:
    """The section that a field holds, also where it may be null or is a list of sections."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for a in get_args(annotation) if (found := section_class(a)) is not None), None)


def _scalar_kinds(annotation: Any) -> set[Any]:
    arguments = get_args(annotation)
    return {annotation} if not arguments else set().union(*(_scalar_kinds(a) for a in arguments))

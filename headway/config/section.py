"""What every section of the experiment file has in common: frozen, strict about keys, forgiving about spelling a type.

The text under a field is its help: editors show it through the JSON Schema, and the docs print it. A field marked
`NullMeans("...")` may be left out or written `null`; what it then holds is said by the mark, and readers always find a
value. Defaults that are lists or mappings are never shared: pydantic copies them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationInfo, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError


@dataclass(frozen=True)
class NullMeans:
    """Marks a field for which `null` stands for something that is worked out at load."""

    meaning: str

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [handler(schema), {"type": "null"}], "x-null-means": self.meaning}


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

    @model_validator(mode="before")
    @classmethod
    def _null_where_it_has_a_meaning(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if value is not None or not cls.null_is_default(key)}

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_not_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and info.field_name is not None:
            kinds = _scalar_kinds(cls.model_fields[info.field_name].annotation)
            if kinds & {int, float} and bool not in kinds:
                raise PydanticCustomError("bool_for_number", "a number was meant, not {value}", {"value": str(value)})
        return value

    @classmethod
    def null_is_default(cls, key: Any) -> bool:
        """Whether `null` at this key stands for the default: marked fields, and whole sections."""
        field = cls.model_fields.get(key)
        if field is None:
            return False
        is_section = isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        return is_section or any(isinstance(mark, NullMeans) for mark in field.metadata)


def _scalar_kinds(annotation: Any) -> set[Any]:
    arguments = get_args(annotation)
    return {annotation} if not arguments else set().union(*(_scalar_kinds(a) for a in arguments))

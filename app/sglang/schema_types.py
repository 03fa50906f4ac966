"""The types in a tool's parameters as SGLang (0.5.14 and newer) writes them into the prompt: JSON Schema's own words.

A server rewrites the names that databases and languages have for them ("dict", "varchar", "float64") before it renders
the tools; names that it does not know it leaves. Facts read from its source and seen at a running 0.5.23. Pure.
"""

import re
from typing import Any

_STANDARD = ("null", "boolean", "object", "array", "number", "string", "integer")
_ALSO = {
    "string": ("str", "text", "varchar", "char", "enum", "uuid", "date", "datetime", "time", "timestamp", "binary",
               "blob", "bytea", "bytes", "varbinary"),
    "boolean": ("bool",),
    "integer": ("bigint", "smallint", "tinyint"),
    "number": ("double", "decimal", "real", "numeric"),
    "array": ("arr", "tuple", "set"),
    "object": ("map",),
}  # fmt: skip
_NAMES = {name: name for name in _STANDARD} | {other: name for name, others in _ALSO.items() for other in others}
#: Whole, or followed by what makes it a kind of its own: int32, list[str].
_BEGINNINGS = (
    (re.compile(r"(?:int|uint|long|short|unsigned)(?![^0-9\[<( \t])"), "integer"),
    (re.compile(r"(?:num|float)(?![^0-9\[<( \t])"), "number"),
    (re.compile(r"list(?![^0-9\[<( \t])"), "array"),
    (re.compile(r"dict(?![^0-9\[<( \t])"), "object"),
)
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OF_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_OF_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames",
               "unevaluatedItems", "unevaluatedProperties")  # fmt: skip


def standard_types(schema: Any) -> Any:
    """A schema with the types in it, and in those inside it, by their standard names."""
    if isinstance(schema, list):
        return [standard_types(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    if "type" in made:
        made["type"] = _standard(made["type"])
    for name in _OF_NAMES:
        if isinstance(made.get(name), dict):
            made[name] = {key: standard_types(inner) for key, inner in made[name].items()}
    for name in (*_OF_LISTS, *_OF_SCHEMAS):
        if name in made and (name in _OF_SCHEMAS or isinstance(made[name], list)):
            made[name] = standard_types(made[name])
    return made


def _standard(given: Any) -> Any:
    if isinstance(given, list):
        names = [_one(name) for name in given]
        return [name for at, name in enumerate(names) if name not in names[:at]]
    return _one(given)


def _one(given: Any) -> Any:
    if not isinstance(given, str) or given in _STANDARD:
        return given
    base = given.split("(", 1)[0].strip().lower()
    begins = (name for pattern, name in _BEGINNINGS if pattern.match(base))
    return _NAMES.get(base) or next(begins, given)

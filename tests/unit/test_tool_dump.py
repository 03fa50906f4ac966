"""Tools as each version of SGLang hands them to the chat template."""

import json

import pytest

from app.sglang.schema_types import standard_types
from app.sglang.tool_dump import bare, dumped, tool_form

F = {"name": "f", "description": "d", "parameters": {"type": "dict"}}
WRAPPED = {"type": "function", "function": F}


@pytest.mark.parametrize(
    ("version", "form"),
    [
        ("0.5.6.post2", "functions"), ("0.5.8", "functions"), ("0.5.9", "strict"), ("0.5.10rc1", "strict"),
        ("0.5.11", "defer"), ("0.5.14", "types"), ("v0.5.22", "types"), ("0.5.23", "ordered"), ("0.6.0", "ordered"),
        (None, "ordered"), ("unknown", "ordered"),
    ],
)  # fmt: skip
def test_the_form_is_that_of_the_version(version, form):
    """One that does not say what it is is taken for a new one."""
    assert tool_form(version) == form


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("given", '{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "dict"}}}'),  # noqa: E501
        ("functions", '{"description": "d", "name": "f", "parameters": {"type": "dict"}, "strict": false}'),
        ("strict", '{"type": "function", "function": {"description": "d", "name": "f", "parameters": {"type": "dict"}, "strict": false}}'),  # noqa: E501
        ("defer", '{"type": "function", "function": {"description": "d", "name": "f", "parameters": {"type": "dict"}, "strict": false}, "defer_loading": null}'),  # noqa: E501
        ("types", '{"type": "function", "function": {"description": "d", "name": "f", "parameters": {"type": "object"}, "strict": false}, "defer_loading": null}'),  # noqa: E501
        ("ordered", '{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}, "defer_loading": null}'),  # noqa: E501
    ],
)  # fmt: skip
def test_keys_and_their_order_are_the_forms(form, expected):
    """Templates print them as they come; a bare function becomes the same as a wrapped one."""
    assert json.dumps(dumped([WRAPPED], form)[0]) == expected
    assert dumped([F], form) == dumped([WRAPPED], form)


def test_what_a_row_left_out_or_added_is_filled_and_dropped():
    """As the server's model classes do; the row's own objects are not touched."""
    given = {"type": "function", "function": {"name": "f", "x": 1, "strict": True}}
    made = dumped([given], "ordered")[0]
    assert made["function"] == {"name": "f", "strict": True, "description": None, "parameters": None}
    assert "x" in given["function"]
    assert bare([WRAPPED]) == [F]


@pytest.mark.parametrize(
    ("given", "standard"),
    [
        ("dict", "object"), ("float", "number"), ("int32", "integer"), ("list[str]", "array"), ("tuple", "array"),
        ("VARCHAR(255)", "string"), ("internal", "internal"), ("any", "any"), ("String", "string"),
        (["str", "text"], ["string"]),
        ("number", "number"), (None, None), ("numpy", "numpy"), ("str, optional", "str, optional"),
    ],
)  # fmt: skip
def test_types_get_their_standard_names(given, standard):
    """Those that the server knows; at every depth that a schema has."""
    assert standard_types({"type": given}) == {"type": standard}
    inside = {"properties": {"a": {"items": {"anyOf": [{"type": given}]}}}, "default": {"type": given}}
    made = standard_types(inside)
    assert made["properties"]["a"]["items"]["anyOf"] == [{"type": standard}]
    assert made["default"] == {"type": given}

"""The published schema of `ringopt diff --json`: what is written is as it says, and it says so of nothing else."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

from ringopt.compare.graph_diff import SCHEMA_VERSION, GraphDiff, diff_views, with_errors
from ringopt.compare.node_values import NodeError
from tests.compare.test_graph_diff import CHAIN, program
from tests.reporting.test_diff_page import many

SCHEMA = json.loads((files("ringopt.compare") / "diff.schema.json").read_text())
TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "null": type(None),
    "boolean": bool,
}  # fmt: skip


def wrong(value: Any, schema: dict[str, Any], at: str = "") -> Iterator[str]:
    """What does not fit, in the words of JSON Schema that ours uses; others are an error."""
    unknown = set(schema) - {"$schema", "$id", "$defs", "title", "description", *KEYWORDS}
    assert not unknown, unknown
    for keyword, check in KEYWORDS.items():
        said = list(check(value, schema, at)) if keyword in schema else []
        yield from said
        if said:  # of another type than the next would look at
            return


def of_reference(value: Any, schema: dict[str, Any], at: str) -> Iterator[str]:
    yield from wrong(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")], at)


def of_type(value: Any, schema: dict[str, Any], at: str) -> Iterator[str]:
    named = schema["type"]
    kinds = [named] if isinstance(named, str) else named
    if not any(isinstance(value, TYPES[kind]) and isinstance(value, bool) <= (kind == "boolean") for kind in kinds):
        yield f"{at}: {value!r} is no {kinds}"


def of_choices(value: Any, schema: dict[str, Any], at: str) -> Iterator[str]:
    if all(list(wrong(value, one)) for one in schema["anyOf"]):
        yield f"{at}: {value!r} is none of {schema['anyOf']}"


def of_object(value: Any, schema: dict[str, Any], at: str) -> Iterator[str]:
    known, others = schema.get("properties", {}), schema["additionalProperties"]
    for name, part in value.items() if isinstance(value, dict) else ():
        if name not in known and others is False:
            yield f"{at}.{name} is unknown"
        else:
            yield from wrong(part, known.get(name, others), f"{at}.{name}")


KEYWORDS: dict[str, Any] = {
    "$ref": of_reference,
    "type": of_type,
    "anyOf": of_choices,
    "const": lambda value, schema, at: [at] if value != schema["const"] else [],
    "enum": lambda value, schema, at: [f"{at}: {value!r}"] if value not in schema["enum"] else [],
    "pattern": lambda value, schema, at: (
        [f"{at}: {value!r}"] if isinstance(value, str) and not re.search(schema["pattern"], value) else []
    ),
    "required": lambda value, schema, at: [f"{at} lacks {name}" for name in schema["required"] if name not in value],
    "additionalProperties": of_object,
    "properties": lambda value, schema, at: [],  # with the others
    "items": lambda value, schema, at: [
        said for n, part in enumerate(value) for said in wrong(part, schema["items"], f"{at}[{n}]")
    ],
}


def every_field() -> GraphDiff:
    """Changes of all kinds, sites, errors without bound, an overlay, and totals that are not known."""
    after = CHAIN.replace("relu", "gelu").replace("w = input", "n = input\nu = input")
    diff = diff_views(program(CHAIN), program(after))
    diff = with_errors(diff, {"y": NodeError(1.0, 0.5, 1e-4), "z": NodeError(math.inf, math.inf, 1e-4)})
    return diff.overlay("us", {"z": math.nan, "y": 2})


@pytest.mark.parametrize("diff", [every_field(), many()], ids=["every field", "attention"])
def test_what_is_written_is_as_the_schema_says(diff: GraphDiff) -> None:
    data = json.loads(json.dumps(diff.to_dict(), allow_nan=False))
    assert list(wrong(data, SCHEMA)) == []
    assert data["schema"] == SCHEMA_VERSION == SCHEMA["properties"]["schema"]["const"]


def test_what_is_not_as_the_schema_says_is_found() -> None:
    data = json.loads(json.dumps(every_field().to_dict()))

    def spoiled(**fields: Any) -> list[str]:
        return list(wrong({**copy.deepcopy(data), **fields}, SCHEMA))

    assert spoiled() == []
    unknown = {"overlays": {"us": {"z": "a"}}}
    for fields in ({"schema": 2}, {"same": 1}, {"more": 1}, {"first_bad": 2}, {"before": {}}, unknown):
        assert spoiled(**fields), fields
    for place, value in (("kind", "gone"), ("error", {"largest": 1}), ("after", "z")):
        assert spoiled(changes=[{**data["changes"][0], place: value}]), place

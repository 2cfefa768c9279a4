"""What the JSON of a .pt2 file says is what the schema of torch.export allows, and no text in it is code.

torch writes names from the file into Python that it compiles, looks operators up by their path, imports what tree
specifications name, and evaluates expressions. So before torch sees a file, its JSON is held against the dataclasses of
torch's schema: every value has the type that its field has, and every text follows the rule for its field. A field that
is not known here may only hold a name.
"""

from __future__ import annotations

import dataclasses
import keyword
import re
import types
import typing
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import Any, TypeAlias

from ringopt.errors import first_line
from ringopt.frontend.pt2.expressions import KEY, NoArithmetic, check_guard, check_range, check_size
from ringopt.frontend.pt2.names import check_operator, check_tree
from ringopt.torch_compat.export import Union, schema

Check: TypeAlias = Callable[[Any], None]

NUMBERS = ("Infinity", "-Infinity", "NaN", "inf", "-inf", "nan")  # floats that JSON has no digits for
NAME = re.compile(r"[^\W\d]\w*")
PATH = re.compile(r"[^'\"\\\x00-\x1f\x7f\u2028\u2029]*")
MAGIC = re.compile(r"(^|\.)__\w*__(\.|$)")
MEMBER = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]*")
DEVICE = re.compile(r"[a-z_]+(:\d{1,3})?")
# Lines of source may hold anything but what moves a terminal, or begins a line where no reader sees one.
TEXT = re.compile(r"[^\x00-\x08\x0b\x0d-\x1f\x7f\u2028\u2029]*")


class Odd(ValueError):
    """What is wrong, and where in the JSON."""

    def __init__(self, sentence: str, place: str = ""):
        super().__init__(f"{place.lstrip('.')}: {sentence}" if place else sentence)
        self.sentence, self.place = sentence, place

    def within(self, place: str) -> Odd:
        return Odd(self.sentence, f"{place}{self.place}")


def check_program(model: Any) -> None:
    """Of models/model.json. Raises Odd."""
    of_type(schema.ExportedProgram)(model)


def check_payload(config: Any) -> None:
    """Of data/weights/model_weights_config.json, and that of the constants. Raises Odd."""
    of_type(schema.PayloadConfig)(config)


# ---- texts -----------------------------------------------------------------------------------------------------------
def _name(value: str) -> None:
    if not NAME.fullmatch(value) or keyword.iskeyword(value):
        raise Odd(f"{value[:60]!a} is not a name")


def _name_or_empty(value: str) -> None:
    if value:
        _name(value)


def _dotted_path(value: str) -> None:
    if not PATH.fullmatch(value) or MAGIC.search(value):
        raise Odd(f"{value[:60]!a} is not the path of a module or a tensor")


def _text(value: str) -> None:
    if not TEXT.fullmatch(value):
        raise Odd("a text with control characters")


def _matching(pattern: re.Pattern[str], what: str) -> Check:
    def check(value: str) -> None:
        if not pattern.fullmatch(value):
            raise Odd(f"{value[:60]!a} is not {what}")

    return check


def _arithmetic(check: Callable[[str], None], what: str) -> Check:
    def checked(value: str) -> None:
        try:
            check(value)
        except NoArithmetic as found:
            raise Odd(f"{value[:60]!a} is not {what}: it holds {found}") from None

    return checked


def _harmless(check: Callable[[str], None]) -> Check:
    def checked(value: str) -> None:
        try:
            check(value)
        except ValueError as found:
            raise Odd(first_line(found)) from None

    return checked


operator, tree = _harmless(check_operator), _harmless(check_tree)
size = _arithmetic(check_size, "the arithmetic of sizes")

# By class and field; of a dict also its keys. All other texts are names.
TEXTS: dict[tuple[type, str], Check] = {
    (schema.Device, "type"): _matching(DEVICE, "a device"),
    (schema.SymExpr, "expr_str"): size,
    (schema.NamedArgument, "name"): _name_or_empty,
    (schema.Node, "name"): _name_or_empty,
    (schema.Node, "target"): operator,
    (schema.Node, "metadata"): _text,
    (schema.Argument, "as_operator"): operator,
    (schema.Argument, "as_string"): _text,
    (schema.Argument, "as_strings"): _text,
    (schema.ConstantValue, "as_string"): _matching(KEY, "a text without quotes"),
    (schema.CustomObjArgument, "class_fqn"): _dotted_path,
    (schema.InputToParameterSpec, "parameter_name"): _dotted_path,
    (schema.InputToBufferSpec, "buffer_name"): _dotted_path,
    (schema.InputToTensorConstantSpec, "tensor_constant_name"): _dotted_path,
    (schema.InputToCustomObjSpec, "custom_obj_name"): _dotted_path,
    (schema.BufferMutationSpec, "buffer_name"): _dotted_path,
    (schema.ParameterMutationSpec, "parameter_name"): _dotted_path,
    (schema.GradientToParameterSpec, "parameter_name"): _dotted_path,
    (schema.ModuleCallSignature, "in_spec"): tree,
    (schema.ModuleCallSignature, "out_spec"): tree,
    (schema.ModuleCallEntry, "fqn"): _dotted_path,
    (schema.GraphModule, "metadata"): _text,
    (schema.GraphModule, "treespec_namedtuple_fields"): _dotted_path,
    (schema.ExportedProgram, "range_constraints"): _arithmetic(check_range, "the arithmetic of sizes"),
    (schema.ExportedProgram, "torch_version"): _matching(re.compile(r"[\w.+<=-]*"), "a version"),
    (schema.ExportedProgram, "guards_code"): _arithmetic(check_guard, "a condition on sizes"),
    (schema.PayloadConfig, "config"): _dotted_path,
    (schema.PayloadMeta, "path_name"): _matching(MEMBER, "a member beside the table that names it"),
}


# ---- values ----------------------------------------------------------------------------------------------------------
@cache
def of_type(kind: Any, texts: Check = _name) -> Check:
    """The check of a value of this type; `texts` is the rule of its field."""
    if isinstance(kind, typing.ForwardRef):
        kind = kind.__forward_arg__
    if isinstance(kind, str):
        kind = getattr(schema, kind)
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return of_type(inside[0], texts)
    if origin in (typing.Union, types.UnionType):
        return _optional(of_type(next(part for part in inside if part is not type(None)), texts))
    if origin is list:
        return _list(of_type(inside[0], texts))
    if origin is dict:
        return _dict(texts, of_type(inside[1], texts))
    if issubclass(kind, Union):
        return _union(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind)
    if issubclass(kind, IntEnum):
        return _enum_member(kind)
    return {int: _integer, float: _number, bool: _boolean, str: _string(texts)}[kind]


def _json_type(value: Any) -> str:
    named = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return named.get(type(value), "a number")


def _integer(value: Any) -> None:
    if type(value) is not int:
        raise Odd(f"{_json_type(value)} in the place of a whole number")
    if not -(2**63) <= value < 2**64:
        raise Odd("a whole number of more than 64 bits")


def _number(value: Any) -> None:
    if type(value) is int:
        _integer(value)
    elif type(value) is not float and value not in NUMBERS:
        raise Odd(f"{_json_type(value)} in the place of a number")


def _boolean(value: Any) -> None:
    if type(value) is not bool:
        raise Odd(f"{_json_type(value)} in the place of true or false")


def _string(texts: Check) -> Check:
    def check(value: Any) -> None:
        if type(value) is not str:
            raise Odd(f"{_json_type(value)} in the place of a text")
        texts(value)

    return check


def _enum_member(kind: type[IntEnum]) -> Check:
    known = set(map(int, kind))

    def check(value: Any) -> None:
        if type(value) is not int or value not in known:
            raise Odd(f"{ascii(value)[:20]} is no {kind.__name__}")

    return check


def _optional(inner: Check) -> Check:
    def check(value: Any) -> None:
        if value is not None:
            inner(value)

    return check


def _list(inner: Check) -> Check:
    def check(value: Any) -> None:
        if type(value) is not list:
            raise Odd(f"{_json_type(value)} in the place of a list")
        for place, part in enumerate(value):
            try:
                inner(part)
            except Odd as odd:
                raise odd.within(f"[{place}]") from None

    return check


def _dict(texts: Check, inner: Check) -> Check:
    def check(value: Any) -> None:
        if type(value) is not dict:
            raise Odd(f"{_json_type(value)} in the place of an object")
        for key, part in value.items():
            texts(key)
            try:
                inner(part)
            except Odd as odd:
                raise odd.within(f"[{ascii(key)[:60]}]") from None

    return check


@cache
def checks_of(kind: type) -> dict[str, Check]:
    """The check of each field of a dataclass of torch's schema, by the field's name."""
    hints = typing.get_type_hints(kind, globalns=vars(schema))
    known = {field: hint for field, hint in hints.items() if not field.startswith("_")}
    return {field: of_type(hint, TEXTS.get((kind, field), _name)) for field, hint in known.items()}


def _union(kind: type) -> Check:
    def check(value: Any) -> None:
        if type(value) is not dict or len(value) != 1:
            raise Odd(f"{_json_type(value)} in the place of one {kind.__name__}")
        (field, part), known = next(iter(value.items())), checks_of(kind)
        if field not in known:
            raise Odd(f"{ascii(field)[:60]} is no kind of {kind.__name__}")
        if field == "as_none":
            return  # whatever stands there is not read
        try:
            known[field](part)
        except Odd as odd:
            raise odd.within(f".{field}") from None

    return check


def _dataclass(kind: Any) -> Check:
    needed = {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def check(value: Any) -> None:
        if type(value) is not dict:
            raise Odd(f"{_json_type(value)} in the place of a {kind.__name__}")
        if lacking := needed - value.keys():
            raise Odd(f"a {kind.__name__} without {sorted(lacking)[0]}")
        for field, known in checks_of(kind).items():
            if field in value:
                try:
                    known(value[field])
                except Odd as odd:
                    raise odd.within(f".{field}") from None
        if kind is schema.Graph:
            inputs_of(value["inputs"])

    return check


def inputs_of(inputs: list[dict[str, Any]]) -> None:
    """A text that is an input is written into a guard, between quotes."""
    quoted = _matching(KEY, "a text without quotes")
    for place, entry in enumerate(inputs):
        if "as_string" in entry:
            try:
                quoted(entry["as_string"])
            except Odd as odd:
                raise odd.within(f".inputs[{place}].as_string") from None

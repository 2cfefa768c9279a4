"""A .pt2 file is data: whatever code stands in it, reading it is refused in one sentence and runs nothing."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ringopt
from ringopt.errors import ProgramError
from ringopt.frontend.pt2 import archive
from ringopt.frontend.pt2.archive import check_readers, json_of
from ringopt.frontend.pt2.schema import checks_of
from ringopt.tools.cli import main
from tests.harness.archives import model_of, rewritten, save_small

CODE = "__import__('os').mkdir('ran')"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("good") / "good.pt2")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def renamed(old: str, new: str) -> Callable[[dict[str, Any]], Any]:
    """A value called otherwise, wherever it is named."""

    def change(said: Any) -> Any:
        if isinstance(said, dict):
            return {new if key == old else key: change(part) for key, part in said.items()}
        if isinstance(said, list):
            return [change(part) for part in said]
        return new if said == old else said

    return change


def graph(said: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = said["graph_module"]["graph"]
    return found


def at(*places: Any, put: Any) -> Callable[[dict[str, Any]], None]:
    """Another value at a place of the JSON."""

    def change(said: Any) -> None:
        for place in places[:-1]:
            said = said[place]
        said[places[-1]] = put

    return change


def in_every_size(text: str) -> Callable[[dict[str, Any]], None]:
    def change(said: dict[str, Any]) -> None:
        for value in graph(said)["tensor_values"].values():
            for size in value["sizes"]:
                if "as_expr" in size:
                    size["as_expr"]["expr_str"] = text

    return change


NODE = ("graph_module", "graph", "nodes", 0)
SIGNATURE = ("graph_module", "module_call_graph", 0, "signature")


def spec(kind: str, context: Any) -> str:
    return json.dumps([1, {"type": kind, "context": context, "children_spec": []}])


FACTORY = {"default_factory_module": "os", "default_factory_name": "getcwd", "dict_context": []}
ENUM = json.dumps([{"__enum__": True, "fqn": "antigravity:Any", "name": "x"}])

IN_THE_MODEL = {
    "input with a default": (renamed("ids", f"ids={CODE}"), "is not a name"),
    "input with a line": (renamed("ids", f"ids):\n  {CODE}\ndef other(x"), "is not a name"),
    "parameter": (renamed("p_qkv_weight", f"p=({CODE})"), "is not a name"),
    "value of a node": (renamed("linear", f"x = None\n{CODE}\ndef g():\n    y"), "is not a name"),
    "keyword of Python": (renamed("linear", "import"), "is not a name"),
    "name of a node": (at(*NODE, "name", put=f"x;{CODE}"), "is not a name"),
    "keyword of a call": (at(*NODE, "inputs", 0, "name", put=f"bias=None)\n{CODE}\ng(z"), "is not a name"),
    "path of a parameter": (renamed("qkv.weight", f'a" + {CODE} + "'), "is not the path of"),
    "magic path": (renamed("qkv.weight", "qkv.__class__"), "is not the path of"),
    "argument name": (at(*SIGNATURE, "forward_arg_names", put=[f"ids={CODE}", "scale", "how"]), "is not a name"),
    "size": (in_every_size(CODE), "is not the arithmetic of sizes"),
    "size among others": (
        in_every_size(f"Mul(Symbol('s0', positive=True, integer=True), len({CODE}))"),
        "is not the arithmetic of sizes",
    ),
    "text that sympy evaluates": (in_every_size(f'Add("{CODE}", Integer(1))'), "is not the arithmetic of sizes"),
    "attribute": (in_every_size("Integer(1).__class__"), "is not the arithmetic of sizes"),
    "keyword argument": (in_every_size(f"Add(Integer(1), evaluate={CODE})"), "is not the arithmetic of sizes"),
    "lambda": (in_every_size("(lambda: 1)()"), "is not the arithmetic of sizes"),
    "tower of powers": (in_every_size("Pow(Integer(10), Pow(Integer(10), Integer(9)))"), "a power other than"),
    "large power of a power": (
        in_every_size("Pow(Pow(Pow(Integer(10), Integer(60)), Integer(60)), Integer(60))"),
        "more than 4096 bits",
    ),
    "unbacked symbol": (
        at("range_constraints", put={"u999999999999": {"min_val": 0, "max_val": 9}}),
        "is not the arithmetic of sizes",
    ),
    "range": (at("range_constraints", put={CODE: {"min_val": 8, "max_val": 9}}), "is not the arithmetic of sizes"),
    "guard": (at("guards_code", put=[CODE]), "is not a condition on sizes"),
    "guard with a method": (at("guards_code", put=["L['ids'].tofile('ran')"]), "is not a condition on sizes"),
    "guard with a quoted key": (
        at("guards_code", put=["L['a\\'+" + CODE.replace("'", "\\'") + "+\\''].size()[0] == 1"]),
        "is not a condition on sizes",
    ),
    "guard with magic": (at("guards_code", put=["L['ids'].__class__ == 1"]), "is not a condition on sizes"),
    "text of an input": (renamed("none", f"'+str({CODE})+'"), "is not a text without quotes"),
    "os.system": (at(*NODE, "target", put="torch.os.system"), "is not an operator"),
    "load_library": (at(*NODE, "target", put="torch.ops.load_library"), "is not an operator"),
    "load_library as a library": (at(*NODE, "target", put="torch.ops.load_library.default"), "is not an operator"),
    "magic of an operator": (at(*NODE, "target", put="torch.ops.aten.add.__class__"), "is not an operator"),
    "globals": (at(*NODE, "target", put="torch.ops.aten.__class__.mro"), "is not an operator"),
    "methodcaller": (at(*NODE, "target", put="_operator.methodcaller"), "is not an operator"),
    "call": (at(*NODE, "target", put="_operator.call"), "is not an operator"),
    "extension": (at(*NODE, "target", put="#ns:op"), "is not an operator"),
    "text that a kernel is compiled of": (
        at(*NODE, "target", put="torch.ops.ringopt_kernels.scored_attention.default"), "does more than compute",
    ),
    "file of a tensor": (at(*NODE, "target", put="torch.ops.aten.from_file.default"), "does more than compute"),
    "compiled library": (at(*NODE, "target", put="torch.ops.higher_order.aoti_call_delegate"), "is not an operator"),
    "operator of another ringopt": (
        at(*NODE, "target", put="torch.ops.ringopt.scater.default"), "has no operator scater"
    ),
    "operator as an argument": (
        at(*NODE, "inputs", 0, "arg", put={"as_operator": "torch.os.system"}), "is not an operator"
    ),
    "module of a defaultdict": (
        at(*SIGNATURE, "in_spec", put=spec("collections.defaultdict", FACTORY)), "which may be any function"
    ),
    "module of an enum": (at(*SIGNATURE, "in_spec", put=spec("builtins.dict", ENUM)), "no enum that was imported"),
    "key with quotes": (
        at(*SIGNATURE, "in_spec", put=spec("builtins.dict", json.dumps([f'a"+{CODE}+"']))), "has quotes"
    ),
    "terminal": (at(*NODE, "metadata", "stack_trace", put="\x1b[2J"), "control characters"),
}  # fmt: skip


def refused_everywhere(path: Path, good: Path, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By every command and function that reads files, in one sentence, and nothing is run or written."""
    before = sorted(os.listdir())
    for command in (["diff", good, path], ["explain", path, "--world-size", "2"], ["convert", path, "out.pt2"]):
        assert main(list(map(str, command))) == 2
        error = capsys.readouterr().err
        assert error.startswith("ringopt: error: ") and error.count("\n") == 1
        assert sentence in error
    for read in (ringopt.load, lambda path: ringopt.diff(good, path), lambda path: ringopt.load(path, trusted=True)):
        with pytest.raises(ProgramError):
            read(path)
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("attack", IN_THE_MODEL)
def test_code_in_the_model_is_refused(attack: str, good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, sentence = IN_THE_MODEL[attack]
    path = rewritten(good, Path("bad.pt2"), change)
    assert model_of(path) != model_of(good)
    refused_everywhere(path, good, sentence, capsys)


class Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def saved(value: object) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def pickled_weight(content: bytes) -> bytes:
    said = json.loads(content)
    next(iter(said["config"].values()))["use_pickle"] = True
    return json.dumps(said).encode()


def elsewhere(content: bytes) -> bytes:
    said = json.loads(content)
    next(iter(said["config"].values()))["path_name"] = "../../etc/passwd"
    return json.dumps(said).encode()


def huge(content: bytes) -> bytes:
    said = json.loads(content)
    next(iter(said["config"].values()))["tensor_meta"]["sizes"] = [{"as_int": 2**62}] * 2
    return json.dumps(said).encode()


WEIGHTS = "model_weights_config.json"
IN_THE_ARCHIVE: dict[str, tuple[dict[str, Any], str]] = {
    "pickle": ({"members": {"sample_inputs/model.pt": pickle.dumps(Runs())}}, "may run any code"),
    "saved object": ({"members": {"sample_inputs/model.pt": saved(Runs())}}, "may run any code"),
    "pickled weight": ({"members": {WEIGHTS: pickled_weight, "weight_0": saved(Runs())}}, "may run any code"),
    "weight elsewhere": ({"members": {WEIGHTS: elsewhere}}, "is not a member beside the table"),
    "huge weight": ({"members": {WEIGHTS: huge}}, "does not lie within data/weights/weight_0"),
    "old weights": ({"more": {"data/weights/model.pt": saved(Runs())}}, "may run any code"),
    "compiled code": ({"more": {"data/aotinductor/model/x.so": b"\x7fELF"}}, "is compiled code"),
    "way out": ({"more": {"../../ran": b"x"}}, "leads out of it"),
    "absolute": ({"more": {"/ran": b"x"}}, "several folders"),
    "other case": ({"more": {"data/sample_inputs/MODEL.pt": pickle.dumps(Runs())}}, "members of one name"),
    "other program": ({"more": {"models/other.json": b"{}"}}, "found programs".replace("found ", "")),
    "list": ({"model": lambda _said: []}, "no schema_version"),
    "not UTF-8": ({"members": {"models/model.json": b"\xff\xfe\x00" * 50}}, "no JSON"),
    "UTF-16": ({"members": {"models/model.json": lambda said: said.decode().encode("utf-16")}}, "no JSON"),
    "digits": (
        {"members": {"models/model.json": lambda said: said.replace(b'"as_int": 1', b'"as_int": ' + b"9" * 5000)}},
        "number of too many digits",
    ),
    "table is a list": ({"members": {WEIGHTS: b"[1]"}}, "a list in the place of a PayloadConfig"),
}


@pytest.mark.parametrize("attack", IN_THE_ARCHIVE)
def test_code_in_the_archive_is_refused(attack: str, good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how, sentence = IN_THE_ARCHIVE[attack]
    refused_everywhere(rewritten(good, Path("bad.pt2"), **how), good, sentence, capsys)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_of_one_name_are_refused(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = rewritten(good, Path("bad.pt2"), more={"models/model.json": b"{}"})
    refused_everywhere(path, good, "members of one name", capsys)


def test_an_archive_that_torch_reads_otherwise_is_refused(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = rewritten(good, Path("other.pt2"), at("torch_version", put="9"))
    reader = archive.FileReader
    monkeypatch.setattr(archive, "FileReader", lambda _path: reader(str(other)))
    with pytest.raises(ProgramError, match="two readers of zip archives read it apart"):
        check_readers(good)


# ---- bounds ----------------------------------------------------------------------------------------------------------
def test_bounds_are_told_and_lifted_for_a_trusted_file(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = {"compression": zipfile.ZIP_DEFLATED, "more": {"extra/zeros": bytes(10**7)}}
    path = rewritten(good, Path("zeros.pt2"), **packed)  # type: ignore[arg-type]
    with pytest.raises(ProgramError, match=r"unpacks to .*, over 100 times that; if you know where it is from, say tr"):
        ringopt.load(path)
    assert ringopt.diff(good, path, trusted=True).same
    assert main(["diff", str(good), str(path), "--trusted"]) == 0
    monkeypatch.setattr(archive, "MOST_JSON", 1000)
    with pytest.raises(ProgramError, match=r"model\.json has .* bytes, over 1,000; if you know"):
        ringopt.load(good)
    ringopt.load(good, trusted=True)


def test_zeros_that_are_not_in_the_file_are_bounded(good: Path) -> None:
    def many(content: bytes) -> bytes:
        said = json.loads(content)
        meta = next(iter(said["config"].values()))["tensor_meta"]
        meta["sizes"], meta["strides"] = [{"as_int": 2**40}], [{"as_int": 1}]
        return json.dumps(said).encode()

    path = rewritten(good, Path("bad.pt2"), members={WEIGHTS: many, "weight_0": b""})
    with pytest.raises(ProgramError, match=r"the tensor 'qkv\.weight' has .* bytes, 0 here; if you know"):
        ringopt.load(path)


def test_a_view_that_is_much_larger_than_what_is_stored_is_bounded(good: Path) -> None:
    def many(content: bytes) -> bytes:
        said = json.loads(content)
        meta = next(iter(said["config"].values()))["tensor_meta"]
        meta["sizes"], meta["strides"] = [{"as_int": 2**40}], [{"as_int": 0}]
        return json.dumps(said).encode()

    path = rewritten(good, Path("bad.pt2"), members={WEIGHTS: many})
    with pytest.raises(ProgramError, match=r"the tensor 'qkv\.weight' has .* bytes, 192 here; if you know"):
        ringopt.load(path)


@pytest.mark.parametrize("levels", [300, 100_000])
def test_depth_is_bounded(levels: int, good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep = b'{"x": ' + b"[" * levels + b"]" * levels + b"}"
    for member in ("models/model.json", WEIGHTS):
        path = rewritten(good, Path("bad.pt2"), members={member: deep})
        assert main(["diff", str(good), str(path)]) == 2
        assert "is nested " in capsys.readouterr().err
    path = rewritten(good, Path("bad.pt2"), more={"extra/ringopt.json": deep})
    assert main(["explain", str(path)]) == 2
    assert "is nested " in capsys.readouterr().err


def test_the_deepest_json_that_is_read_has_200_levels() -> None:
    def nested(levels: int) -> Any:
        return json_of(Path("a.pt2"), "models/model.json", b"[" * levels + b"]" * levels, trusted=False)

    assert nested(200)[0] == nested(199)
    with pytest.raises(ProgramError, match=r"^a.pt2: models/model\.json is nested deeper than 200 levels; if you know"):
        nested(201)


# ---- what passes -----------------------------------------------------------------------------------------------------
def test_the_file_that_was_changed_is_good(good: Path) -> None:
    program = ringopt.load(good)
    x = torch.rand(1, 8, 4)
    program.module()(x, scale=torch.ones(4), how="none")
    assert ringopt.diff(good, rewritten(good, Path("same.pt2"))).same


def test_every_text_of_the_schema_has_a_rule() -> None:
    """A field that a later torch adds holds a name, or files with it are refused."""
    from torch._export.serde import schema

    from ringopt.frontend.pt2.schema import TEXTS

    for kind, field in TEXTS:
        assert field in checks_of(kind), f"{kind.__name__} has no {field}"
        assert vars(schema)[kind.__name__] is kind


def test_numbers_of_torch_are_known() -> None:
    from torch._export.serde.serialize import _SYM_OPS

    from ringopt.frontend.pt2.names import FUNCTIONS

    assert {f"{op.__module__}.{op.__name__}" for op in _SYM_OPS} <= set(FUNCTIONS)

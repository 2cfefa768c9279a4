"""Changed scores and dropped weights in one kernel: what is written for a mask, its numbers under Triton's interpreter
against matrix products, over ranks too, and compiled for a GPU that is not here."""

from __future__ import annotations

import importlib.util
import operator
import sys
from collections.abc import Iterator
from dataclasses import replace
from threading import Lock
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ringopt.context_parallel.executor import dropout
from ringopt.context_parallel.executor.attend import attend, attend_backward
from ringopt.context_parallel.executor.dropout import Dropout
from ringopt.context_parallel.executor.operands import Attention, Operands, Saved
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.plan_of import exchange_of
from ringopt.expr.evaluate import evaluate
from ringopt.expr.mask import Mask, ScoreBlock
from ringopt.expr.terms import Term, affine, applied, axis, converted, load, number, score
from ringopt.ir.refusal import Refusal
from ringopt.kernels import scored
from ringopt.kernels.base import HIDDEN, TileInputs, WholeRows
from ringopt.kernels.choose import WithOthers
from ringopt.kernels.cpu_flash import CpuFlash
from ringopt.kernels.math import Math, Modifier
from ringopt.kernels.score_program import OPS, function_of, scores_program
from ringopt.kernels.scored import Drop, Scored, TilePlace
from tests.context_parallel.reference import join, shard
from tests.harness.threads import ThreadMesh, run_on_threads
from tests.harness.triton_interpreter import with_bounds
from tests.kernels.test_kernels import draw
from tests.kernels.test_triton_merge import compiled

FLOAT, INT, BOOL = torch.float32, torch.int64, torch.bool
S = score(FLOAT)
NAME = "ringopt.kernels.triton_scored"
TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def of(op: str, *args: Any, dtype: torch.dtype = FLOAT) -> Term:
    return applied(op, args, dtype)


CAPPED = of("mul", of("tanh", of("mul", S, 0.5)), 2.0)
ALIBI = of("mul", load(0, [axis("h")], FLOAT), affine({"k": 1, "q": -1}, 0))
SEEN = of("logical_and", load(1, [axis("b"), axis("k")], BOOL), of("le", axis("k"), axis("q"), dtype=BOOL), dtype=BOOL)
MASK = Mask(score=CAPPED, bias=ALIBI, visible=SEEN)


def sources() -> list[Tensor]:
    return [draw(4, dtype=FLOAT, seed=1), draw(2, 90, seed=2) > -1]


# ---- what is written ---------------------------------------------------------------------------------------------
class Pointer:
    """To an element of a tensor."""

    def __init__(self, x: Tensor):
        self.x, self.at = x, torch.zeros((), dtype=INT)

    def __add__(self, step: Any) -> Pointer:
        found = Pointer(self.x)
        found.at = self.at + step
        return found

    def load(self) -> Tensor:
        return self.x.as_strided((self.x.untyped_storage().size() // self.x.element_size(),), (1,))[self.at]


def tensor(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.tensor(x)


def of_torch(name: str) -> Any:
    return lambda *args: getattr(torch, name)(*map(tensor, args))


TL = SimpleNamespace(
    **{name: of_torch(name) for name in ("where", "abs", "exp", "log", "sqrt", "sigmoid", "minimum", "maximum")},
    cast=lambda x, dtype: tensor(x).to(dtype),
    load=Pointer.load,
    **{"float32": FLOAT, "bfloat16": torch.bfloat16, "float16": torch.float16, "int64": INT},
)


def run(mask: Mask, s: Tensor, block: ScoreBlock, given: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The program of a mask in eager PyTorch: value, slope, seen."""
    program = scores_program(mask, True)
    assert isinstance(program, str), program
    found: dict[str, Any] = {"triton": SimpleNamespace(jit=lambda function: function), "tl": TL}
    exec(program.partition("tl\n")[2], found)
    place = block.coordinates()
    steps, sizes = [x.stride() for x in given], [x.shape for x in given]
    value, slope, seen = found["scores"](s, *(place[name] for name in "bhqkr"), list(map(Pointer, given)), steps, sizes)
    return tensor(value).expand(s.shape), tensor(slope).expand(s.shape), tensor(seen).expand(s.shape)


BY_ITSELF = {
    **{op: of(op, S) for op in ("neg", "abs", "exp", "tanh", "sigmoid", "relu", "detach")},
    **{op: of(op, of("abs", S)) for op in ("log", "sqrt")},
    **{op: of(op, S, ALIBI) for op in ("add", "sub", "rsub", "mul", "div", "minimum", "maximum")},
    **{f"{op} with itself": of(op, S, of("mul", S, 2.0)) for op in ("add", "mul", "div", "minimum")},
    **{op: of("where", of(op, S, 0.25, dtype=BOOL), CAPPED, S) for op in ("le", "lt", "ge", "gt", "eq", "ne")},
    "logical_not": of("where", of("logical_not", SEEN, dtype=BOOL), of("mul", S, 3.0), 1.0),
    "logical_or": of("where", of("logical_or", SEEN, of("gt", S, 0.0, dtype=BOOL), dtype=BOOL), S, -1.0),
    "floor_divide": of("mul", S, of("floor_divide", affine({"q": 1, "k": -1}, 0), 7, dtype=INT)),
    "remainder": of("mul", S, of("remainder", affine({"q": 1, "k": -1}, 0), 7, dtype=INT)),
    "16 bits": converted(of("tanh", converted(S, torch.bfloat16), dtype=torch.bfloat16), FLOAT),
    "a number below 0": of("add", S, load(0, [affine({}, -1)], FLOAT)),
    "no score": number(2.0, FLOAT),
}


@pytest.mark.parametrize("name", BY_ITSELF)
def test_a_program_gives_the_term_and_its_slope(name: str) -> None:
    term, block, given = BY_ITSELF[name], ScoreBlock(2, range(1, 4), range(5, 19), range(8, 30)), sources()
    s = draw(2, 3, 14, 22, dtype=FLOAT).requires_grad_()
    right = evaluate(term, {**block.coordinates(), "score": s}, given).to(FLOAT).expand(s.shape)
    (slope,) = torch.autograd.grad(right.sum(), s, allow_unused=True) if right.requires_grad else (None,)
    value, found, seen = run(Mask(score=term), s.detach(), block, given)
    assert seen.all()
    torch.testing.assert_close(value, right.detach(), rtol=1e-5, atol=1e-5)
    close = {"rtol": 1e-2, "atol": 1e-2} if name == "16 bits" else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found, slope if slope is not None else torch.zeros_like(s.detach()), **close)


def test_every_rule_is_tried() -> None:
    tried = {term.op for one in BY_ITSELF.values() for term in _walk(one) if hasattr(term, "op")} | {"logical_and"}
    assert set(OPS) <= tried


def _walk(term: Term) -> Iterator[Any]:
    from ringopt.expr.terms import walk

    return walk(term)


def test_a_program_hides_and_adds() -> None:
    block, given = ScoreBlock(2, 4, range(60, 75), range(50, 80)), sources()
    s = draw(2, 4, 15, 30, dtype=FLOAT)
    value, _, seen = run(MASK, s, block, given)
    expected = MASK.modified(s, block, given) + MASK.additive(block, given, FLOAT)
    torch.testing.assert_close(value.masked_fill(~seen, HIDDEN), expected)
    hides = Mask(bias=of("where", SEEN, ALIBI, float("-inf")))
    torch.testing.assert_close(run(hides, s, block, given)[0], s + hides.additive(block, given, FLOAT))


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        (Mask(score=of("erf", S)), "erf has no form in Triton"),
        (Mask(score=score(torch.float64)), "torch.float64 has no form in Triton"),
        (Mask(bias=of("mul", S, 2.0)), "a bias that depends on the score"),
        (Mask(score=applied("div", [S, 2.0], FLOAT, [("rounding_mode", "floor")])), "div has no form in Triton"),
    ],
)
def test_what_has_no_program(mask: Mask, sentence: str) -> None:
    found = scores_program(mask, True)
    assert isinstance(found, Refusal) and found.sentence == sentence


def test_who_takes_it() -> None:
    q = torch.zeros(1, 1, 4, 16)
    assert "Triton, a GPU" in str(scored.refusal_of_scored(q, 16, MASK, []))


@TRITON
@pytest.mark.parametrize("dim, block", [(64, 64), (65, 32), (128, 32), (129, 16)])
def test_the_wider_a_row_is_the_fewer_are_in_a_tile(dim: int, block: int) -> None:
    """Rows of keys or of values, whichever are wider."""
    from ringopt.kernels.triton_scored import common

    narrow, wide = torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, dim)
    for q, v in ((narrow, wide), (wide, narrow)):
        constants = common(q, q, v, (None, (), None, "", (), (), 1.0, 0, 1.0))[2]
        assert (constants["BM"], constants["BN"]) == (block, block)


# ---- numbers ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The kernels as Triton's interpreter runs them, on the CPU, for whoever asks."""
    from triton import language
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_bounds(interpreter._patch_lang_tensor))
    standard = language.standard  # which others may have imported for a GPU
    places = (language, language.core, language.math, standard, language.core.tensor)
    before = [dict(vars(place)) for place in places]  # what the interpreter puts there has to be gone afterwards
    for name, function in vars(standard).copy().items():
        if isinstance(function, JITFunction):
            inner = InterpretedFunction(function.fn)
            for module in (standard, language):
                if getattr(module, name, None) is function:
                    monkeypatch.setattr(module, name, inner)
    module, one = fresh(), Lock()  # the interpreter has one grid for all threads

    def in_turn(function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with one:
                return function(*args, **kwargs)

        return run

    monkeypatch.setattr(module, "forward", in_turn(module.forward))
    monkeypatch.setattr(module, "backward", in_turn(module.backward))
    monkeypatch.setitem(sys.modules, NAME, module)
    monkeypatch.setattr(scored, "usable", lambda x: x.dtype != torch.float64)
    scored.works.cache_clear()
    yield module
    scored.works.cache_clear()
    function_of.cache_clear()
    monkeypatch.undo()
    for place, found in zip(places, before, strict=True):
        for name, value in found.items():
            if vars(place).get(name) is not value:
                setattr(place, name, value)


def fresh() -> ModuleType:
    """The module anew, and what it is given: Triton decides when it decorates a function who runs it."""
    function_of.cache_clear()
    spec = importlib.util.find_spec(NAME)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", ["all", "causal", "a mask in memory", "all dropped"])
def test_numbers(interpreted: ModuleType, case: str, dtype: torch.dtype) -> None:
    """37 queries over 50 keys, 4 heads over 2, keys of 20 and values of 24."""
    queries, keys, place = 37, 37 if case == "causal" else 50, TilePlace(range(40, 77), range(30, 80), range(3, 40), 0)
    q, k, v, dout = (
        draw(2, heads, rows, dim, dtype=dtype, seed=i).transpose(1, 2).contiguous().transpose(1, 2)
        for i, (heads, rows, dim) in enumerate(((4, queries, 20), (2, keys, 20), (2, keys, 24), (4, queries, 24)))
    )
    drop, given = Dropout(1.0 if case == "all dropped" else 0.3, torch.tensor(77)), sources()
    block, rows = ScoreBlock(2, 4, place.queries, place.keys[:keys]), place.queries
    memory = MASK.additive(block, given, FLOAT).expand(2, 4, queries, keys)
    apart = torch.arange(keys) - torch.arange(queries)[:, None]
    hidden = memory.masked_fill((apart < -9) | (apart >= 30), HIDDEN) if case == "all" else memory
    right = Math(
        modifier=Modifier(lambda scores, some: MASK.modified(scores, replace(block, queries=rows[some]), given)),
        factor=lambda some: drop.factor(2, 4, rows[some], block.keys, FLOAT),
    )
    kept = Drop(drop.seed, min(drop.least, 2**63 - 1), drop.keep)
    in_memory = case == "a mask in memory"
    kernel = Scored(MASK, given, place, kept, whole=not in_memory)
    tile = TileInputs(q, k, v, 0.3, causal=case == "causal", band=(-9, 30) if case == "all" else None)
    asked = replace(tile, mask=hidden, band=None)
    tile = replace(tile, mask=memory) if in_memory else tile
    expected, found = right.forward(asked), kernel.forward(tile)
    whole = WholeRows(dout, expected[0].to(dtype), expected[1])
    if in_memory:  # and its gradient
        gradients = right.backward_with_mask(asked, whole), kernel.backward_with_mask(tile, whole)
    else:
        gradients = right.backward(asked, whole), kernel.backward(tile, whole)
    pairs = zip((*expected, *gradients[0]), (*found, *gradients[1]), strict=True)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    for wanted, got in pairs:
        torch.testing.assert_close(got.float(), wanted.float(), rtol=tolerance, atol=tolerance)
    assert case != "all dropped" or not found[0].any()


@TRITON
def test_the_same_weights_are_dropped(interpreted: ModuleType) -> None:
    """Of equal scores and values that name their key: which are kept shows in the output."""
    keys = 70
    drop, q = Dropout(0.4, torch.tensor(-5)), torch.zeros(1, 1, 33, 16)
    v = torch.eye(keys).view(1, 1, keys, keys)
    place = TilePlace(range(7, 40), range(100, 100 + keys), range(33), 2)
    out, _ = Scored(Mask(), [], place, Drop(drop.seed, drop.least, drop.keep), False).forward(
        TileInputs(q, torch.zeros(1, 1, keys, 16), v, 1.0)
    )
    assert torch.equal(out[0, 0] > 0, drop.kept(1, range(2, 3), place.queries, place.keys)[0, 0])
    numbers = ("FIRST", "SECOND", "ROWS", "KEYS")
    assert all(getattr(dropout, name) % 2**64 == getattr(interpreted, name).value for name in numbers)


@TRITON
def test_it_is_tried_on_a_device_once(interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = torch.device("cpu"), torch.float16, 20, 40
    assert scored.works(*tried)
    scored.works.cache_clear()
    forward = interpreted.forward
    monkeypatch.setattr(interpreted, "forward", lambda *args: tuple(map(operator.neg, forward(*args))))
    with pytest.warns(UserWarning, match="do not work on cpu, and are not used: their numbers are wrong"):
        assert not scored.works(*tried)


@TRITON
@pytest.mark.parametrize(
    ("pattern", "layout", "asked"),
    [
        ("causal", "zigzag", "softcap"),
        ("window(9)", "contiguous", "softcap"),
        ("full", "contiguous", "all"),
        ("causal", "zigzag", "learned"),
    ],
)
def test_over_ranks(interpreted: ModuleType, pattern: str, layout: str, asked: str) -> None:
    """Three ranks, weights dropped, a bias that is learned; the numbers are those of matrix products."""
    assert scored.works(torch.device("cpu"), FLOAT, 16, 16)
    n, calls = 31, list[str]()
    mask = Mask(score=CAPPED) if asked == "softcap" else MASK
    forward = interpreted.forward
    interpreted.forward = lambda *args: (calls.append("forward"), forward(*args))[1]  # type: ignore[attr-defined]
    whole = [draw(1, heads, n, 16, dtype=FLOAT, seed=heads + i) for i, heads in enumerate((2, 1, 1, 2))]

    def ran(kernel: Any) -> list[Tensor]:
        exchange = exchange_of(ShardedPattern(pattern, n, n, 3, layout, layout), "ring")
        site = Attention(exchange, mask, kernel, 0.3, learned=(0,) if asked == "learned" else (), dropout_p=0.2)

        def body(mesh: ThreadMesh) -> list[Tensor]:
            q, k, v, dout = (shard(x, layout, 3, mesh.rank) for x in whole)
            given = Operands(q, k, v, sources() if mask is MASK else [], None, torch.tensor(3))
            out, lse = attend(site, mesh, given)
            *grads, learned = attend_backward(site, mesh, dout, Saved(given, out, lse))
            return [out, *grads, *learned]

        out, dq, dk, dv, *learned = zip(*run_on_threads(3, body), strict=True)
        return [*(join(parts, layout) for parts in (out, dq, dk, dv)), *(sum(parts) for parts in learned)]

    expected = ran(Math())
    assert not calls, "who asks for matrix products gets them"
    backward = interpreted.backward
    interpreted.backward = lambda *args, learns: (calls.append("learns" * learns), backward(*args, learns=learns))[1]
    found = ran(WithOthers(CpuFlash(), Math()))
    assert calls.count("forward") == {"causal": 15, "window(9)": 5, "full": 6}[pattern]
    assert ("learns" in calls) == (asked == "learned")
    for wanted, got in zip(expected, found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@TRITON
def test_it_compiles_for_an_h100() -> None:
    module, program, stride = fresh(), scores_program(MASK, True), ("i64",) * 3
    place, read = ("i32",) * 7, (("*fp32", "*i1"), (("i64",), ("i64", "i64")), (("i32",), ("i32", "i32")))
    shared = {
        **{name: "*bf16" for name in ("q", "k", "v", "mask")},
        **{"seed": "*i64", "given": ("i32", "i32", place, ("i32", "i32"), ("i64",) * 4, *read)},
        **{"drop": ("i64", "fp32"), "scale": "fp32", "heads": "i32", "groups": "i32", "dims": ("i32", "i32")},
    }
    constants = {"SCORES": function_of(program, "scores"), "MASKED": False, "BANDED": True, "DROPS": True}
    results = ({"out": "*bf16", "lse": "*fp32"}, 4), ({"dout": "*bf16", "out": "*bf16", "lse": "*fp32"}, 6)
    sums = {name: "*fp32" for name in ("dq", "delta", "dmask", "dk", "dv")}
    for name, (given, number_of) in (("forward", results[0]), ("queries", results[1]), ("keys", results[1])):
        function = getattr(module, f"{name}_kernel")
        arguments = {**shared, **given, **sums, "strides": (stride,) * number_of}
        arguments = {key: kind for key, kind in arguments.items() if key in function.arg_names}
        own = {"LEARNS": True} if name == "queries" else {}
        kernel = compiled(function, arguments, constants | own | {"BM": 64, "BN": 64, "BD": 128, "BV": 128})
        assert "wgmma" in kernel.asm["ptx"] and "st.local" not in kernel.asm["ptx"], "tensor cores, and no spills"
        assert kernel.metadata.shared < 227 * 1024

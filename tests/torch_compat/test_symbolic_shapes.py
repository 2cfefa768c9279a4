"""Open sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import sympy
import torch
import torch.fx as fx

from ringopt.torch_compat.fake_tensors import FakeTensorMode
from ringopt.torch_compat.symbolic_shapes import (
    FUNCTIONS,
    CeilToInt,
    FloorDiv,
    GuardAsked,
    GuardOnDataDependentSymNode,
    IntTrueDiv,
    Max,
    Mod,
    PickedSizes,
    PythonMod,
    ShapeEnv,
    SymNode,
    asserted_size,
    compute_unbacked_bindings,
    computed,
    float_symbol,
    free_unbacked_symbols,
    range_of,
    statically_known_true,
    unbacked_size,
    without_guards,
)


def open_tensor(env: ShapeEnv) -> Any:
    """[n, 3]."""
    return FakeTensorMode(shape_env=env).from_tensor(torch.ones(7, 3))


def test_a_size_has_an_expression_and_a_decision_is_a_guard() -> None:
    env = ShapeEnv()
    size = open_tensor(env).shape[0]
    assert size.node.expr.is_Symbol and size.node.shape_env is env and size.node.hint == 7
    assert statically_known_true(size * 2 >= size) and not statically_known_true(size == 7)
    assert not env.guards
    assert size > 5 and len(env.guards) == 1
    assert env.bound_sympy(size.node.expr).lower >= 2
    assert int(size) == 7 and size.node.expr == 7


def test_how_sizes_are_rounded_and_what_remains() -> None:
    size = open_tensor(ShapeEnv()).shape[0]
    forms = {FloorDiv: size // 4, Mod: size % 4, PythonMod: -size % 4, CeilToInt: math.ceil(size / 4)}
    forms[Max] = torch.sym_max(size, 7)
    for kind, form in forms.items():
        assert isinstance(form.node.expr, kind)
    assert isinstance(forms[CeilToInt].node.expr.args[0], IntTrueDiv)


def test_the_range_of_an_expression() -> None:
    env = ShapeEnv()
    size = open_tensor(env).shape[0]
    n, expr = size.node.expr, (3 * size + 1).node.expr
    assert range_of(expr, env, {n: (4, 9)}) == (13, 28)
    assert range_of(expr, env, {})[0] == 7 and range_of(expr, env, {})[1] > 1 << 60
    assert size <= 50 and range_of(expr, env, {}) == (7, 151)
    assert range_of(sympy.Integer(5), env, {}) == (5, 5)


def test_a_decision_is_refused_before_anything_is_noted() -> None:
    env = ShapeEnv()
    size = open_tensor(env).shape[0]
    for ask in (lambda: int(size), lambda: bool(size > 5), lambda: bool(size % 2 == 1), lambda: torch.ones(7)[:size]):
        with pytest.raises(GuardAsked), without_guards(env):
            ask()
    with without_guards(env):
        assert size * 2 >= size  # of any number
        with pytest.raises(GuardAsked), without_guards(env):  # within another
            int(size)
        with pytest.raises(GuardAsked):
            int(size)
    assert not env.guards and not env.replacements and size.node.expr.is_Symbol
    with without_guards(env, follows=lambda expr: expr == (size.node.expr > 5)):
        assert size > 5 and len(env.guards) == 1
        with pytest.raises(GuardAsked):
            bool(size > 6)


def test_what_stands_for_a_size_that_is_another() -> None:
    env = ShapeEnv()
    one, other = (open_tensor(env).shape[0] for _ in range(2))
    if one.node.expr != other.node.expr:
        assert one == other
    assert env.replace(env.replace(one.node.expr) - other.node.expr) == 0


def test_a_number_of_a_program_is_made_of_an_expression() -> None:
    env, symbol = ShapeEnv(), sympy.Symbol("s0", integer=True)
    size = torch.SymInt(SymNode(symbol + 1, env, int, 1))
    assert (size * 2).node.expr == 2 * symbol + 2


def test_a_size_without_a_number_is_known_as_such() -> None:
    env = ShapeEnv()
    size = env.create_unbacked_symint()
    with FakeTensorMode(shape_env=env):
        x = torch.empty(size, 2)
    assert free_unbacked_symbols(x) == {size.node.expr} and not free_unbacked_symbols(torch.ones(2))
    with pytest.raises(GuardOnDataDependentSymNode):
        bool(size > 5)


def test_where_a_new_size_comes_up_is_told() -> None:
    env = ShapeEnv(allow_dynamic_output_shape_ops=True)
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.ones(4))
    with mode:
        found = torch.nonzero(x)
    bindings = compute_unbacked_bindings(env, found)
    assert bindings is not None and list(bindings) == [found.shape[0].node.expr]


def test_an_expression_is_computed_with_numbers_or_nodes_of_a_graph() -> None:
    symbol = sympy.Symbol("s0", integer=True)
    make = FUNCTIONS
    third = make["IntTrueDiv"](symbol, sympy.Integer(3))
    formulas = {
        make["FloorDiv"](symbol + 1, 2): 4, third: 7 / 3, make["CeilToInt"](third): 3, make["FloorToInt"](third): 2,
        make["RoundToInt"](third): 2, make["TruncToInt"](third): 2, make["RoundDecimal"](third, sympy.Integer(1)): 2.3,
        make["OpaqueUnaryFn_cos"](symbol): math.cos(7), make["FloatPow"](third, sympy.Float(0.5)): math.sqrt(7 / 3),
        sympy.Abs(symbol - 9): 2,
    }  # fmt: skip
    for formula, expected in formulas.items():
        tracer = fx.proxy.GraphAppendingTracer(fx.Graph())
        found = computed(formula, {symbol: fx.Proxy(tracer.graph.placeholder("n"), tracer)})
        tracer.graph.output(found.node)
        assert fx.GraphModule({}, tracer.graph)(7) == computed(formula, {symbol: 7}) == pytest.approx(expected)


def test_the_functions_of_sizes_in_files() -> None:
    assert {"FloorDiv", "CleanDiv", "Mod", "PythonMod", "Max", "Min", "ModularIndexing", "Where"} <= FUNCTIONS.keys()
    assert sympy.sympify("FloorDiv(s0, 2)", locals=FUNCTIONS).subs("s0", 7) == 3


def test_a_float_that_dynamo_leaves_open_is_a_symbol() -> None:
    found: list[Any] = []

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        values = (node.meta.get("example_value") for node in gm.graph.find_nodes(op="call_method", target="item"))
        found.extend(float_symbol(value) for value in values if isinstance(value, torch.SymFloat))
        return gm

    run = torch.compile(lambda x, scale: x * scale, backend=backend)
    for scale in (1.5, 2.5):
        run(torch.ones(2), scale)
    assert [symbol.is_Symbol for symbol in found] == [True]


def test_an_operator_gives_a_size_that_is_not_known_yet() -> None:
    @torch.library.custom_op("ringopt_test::rows", mutates_args=())
    def rows(x: torch.Tensor) -> int:
        return len(x)

    @rows.register_fake
    def _(x: torch.Tensor) -> int:
        return unbacked_size(minimum=3)  # type: ignore[return-value]

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.ones(4))
    with mode:
        size: Any = rows(x)
    assert isinstance(size, torch.SymInt) and size.node.expr in env.var_to_range
    assert env.var_to_range[size.node.expr].lower == 3


def test_sizes_that_data_decide_stand_for_several_rows() -> None:
    with FakeTensorMode(shape_env=PickedSizes()) as mode:
        x = mode.from_tensor(torch.ones(7, 3))
        rows = x[:, 0].nonzero()[:, 0]
        found = x[rows] * 2  # asks whether it is one row, or none
        assert free_unbacked_symbols(found) and found.shape[1] == 3
        first, second = (x[0, place].to(torch.int64).item() for place in range(2))
        assert asserted_size(first + second) is None
        x.split([first, second])  # type: ignore[list-item]
        assert asserted_size(first + second) == 7 and asserted_size(first) is None  # type: ignore[arg-type]
        with pytest.raises(GuardOnDataDependentSymNode):
            bool(found.shape[0] > 4)

"""Dynamo: settings, errors, sources, and the frames around a compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._dynamo.config
from torch import nn
from torch._dynamo import convert_frame
from torch._dynamo.symbolic_convert import SpeculationLog
from torch._dynamo.variables.functions import NestedUserFunctionVariable

from ringopt.torch_compat import dynamo
from ringopt.torch_compat.aot_autograd import min_cut_rematerialization_partition
from ringopt.torch_compat.dynamo import (
    BackendCompilerFailed,
    TensorifyScalarRestartAnalysis,
    TensorifyState,
    TorchDynamoException,
    TransformGetItemToIndex,
    counters,
    is_batchedtensor,
)

Backend = Callable[[torch.fx.GraphModule, Any], Any]


def looking(look: Callable[[torch.fx.GraphModule], None]) -> Backend:
    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        look(gm)
        return gm

    return backend


def test_a_module_knows_that_it_was_compiled_in_place() -> None:
    module = nn.Linear(2, 2)
    assert not dynamo.is_compiled(module)
    module.compile(backend="eager")
    assert dynamo.is_compiled(module)


def test_comparisons_are_written_as_python_calls_them() -> None:
    targets: list[Any] = []
    look = looking(lambda gm: targets.extend(node.target for node in gm.graph.nodes if node.op == "call_function"))
    torch.compile(lambda x: (x < 1, x >= 2, x != 3, x + 1), backend=look)(torch.ones(2))  # == is a method in torch 2.11
    assert [target in dynamo.COMPARISONS for target in targets] == [True, True, True, False]


def test_graphs_stay_whole_in_ddp() -> None:
    with dynamo.patched(optimize_ddp=True):
        dynamo.leave_graphs_whole_in_ddp()
        assert torch._dynamo.config.optimize_ddp is False


def test_what_a_backend_raises_comes_with_its_cause() -> None:
    def fail(_gm: torch.fx.GraphModule) -> None:
        raise ValueError("no")

    with pytest.raises(BackendCompilerFailed) as raised:
        torch.compile(torch.sin, backend=looking(fail))(torch.ones(1))
    assert isinstance(raised.value.inner_exception, ValueError)
    assert issubclass(BackendCompilerFailed, TorchDynamoException)
    assert issubclass(TensorifyScalarRestartAnalysis, TorchDynamoException)


def test_an_open_float_is_fixed_on_request() -> None:
    symbols: list[Any] = []

    def look(gm: torch.fx.GraphModule) -> None:
        taken = gm.graph.find_nodes(op="call_method", target="item")
        symbols.append([str(node.meta["example_value"].node.expr) for node in taken])
        for name in symbols[-1]:
            TensorifyState.specialize(name)
            assert name in TensorifyState.force_specializations
        if taken:
            raise TensorifyScalarRestartAnalysis

    run = torch.compile(lambda x, scale: x * scale, backend=looking(look))
    assert [run(torch.ones(1), scale).item() for scale in (1.5, 2.5)] == [1.5, 2.5]
    TensorifyState.clear()
    assert len(symbols) == 3 and symbols[1] and not symbols[2] and not TensorifyState.force_specializations


def test_numbers_in_tensors_index_tensors() -> None:
    x = torch.arange(6).view(2, 3)
    with TransformGetItemToIndex():
        found = torch.vmap(lambda i: x[i, 1])(torch.tensor([1, 0]))
    assert found.tolist() == [4, 1]


def test_which_tensors_vmap_runs_over() -> None:
    one, over = torch.ones(3), []
    torch.vmap(lambda x: over.append((is_batchedtensor(x), is_batchedtensor(one))) or x)(torch.ones(2, 3))
    assert over == [(True, False)]


def test_who_has_opened_a_size() -> None:
    told = []

    def backend(gm: Any, inputs: Any) -> Any:
        told.append(dynamo.opens_sizes_that_change())
        return gm.forward

    for dynamic in (None, True, False):
        torch._dynamo.reset()
        torch.compile(torch.sin, backend=backend, dynamic=dynamic)(torch.ones(3))
    assert told == [True, False, False]


def test_settings_and_their_end() -> None:
    limit = dynamo.recompile_limit()
    with dynamo.patched(recompile_limit=limit + 3, automatic_dynamic_shapes=False):
        assert dynamo.recompile_limit() == limit + 3
    assert dynamo.recompile_limit() == limit


def test_compilers_count_by_name() -> None:
    counters.clear()
    torch.compile(torch.sin, backend=looking(lambda gm: None))(torch.ones(3))
    assert counters["stats"]["unique_graphs"] >= 1 and counters["inductor"]["fuse_attention"] == 0


def test_forward_and_backward_are_handed_over() -> None:
    graphs: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        split = min_cut_rematerialization_partition
        return dynamo.aot_eager(gm, inputs, split, lambda graph: graphs.append(graph.code))

    x = torch.ones(2, requires_grad=True)
    torch.compile(lambda x: x.sin(), backend=backend)(x).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, torch.ones(2).cos())
    assert len(graphs) == 2 and "sin" in graphs[0] and "cos" in graphs[1]


# ---- where an input is from ------------------------------------------------------------------------------------------
TABLE = torch.ones(2)


def test_inputs_tell_where_they_are_from() -> None:
    class Program(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.mask * TABLE

    found: dict[str, str] = {}

    def look(gm: torch.fx.GraphModule) -> None:
        placeholders = gm.graph.find_nodes(op="placeholder")
        found.update({dynamo.source_of(node): dynamo.guard_source_of(node) for node in placeholders})

    torch.compile(Program(), backend=looking(look))(torch.zeros(2))
    assert len(found) == 3 and found["L['x']"] == "LOCAL"
    (mask,) = (kind for name, kind in found.items() if "mask" in name)
    (table,) = (kind for name, kind in found.items() if "TABLE" in name)
    assert "NN_MODULE" in mask and table.startswith("GLOBAL")


def test_a_number_made_a_tensor_has_no_place() -> None:
    found: list[str] = []

    def look(gm: torch.fx.GraphModule) -> None:
        taken = gm.graph.find_nodes(op="call_method", target="item")
        found.extend(dynamo.guard_source_of(node.args[0]) for node in taken)

    run = torch.compile(lambda x, scale: x * scale, backend=looking(look))
    for scale in (1.25, 2.25):
        run(torch.ones(2), scale)
    assert found == [""]


def test_what_is_not_dynamos_says_nothing() -> None:
    gm = torch.fx.symbolic_trace(lambda x: x.sin())
    (node,) = gm.graph.find_nodes(op="placeholder")
    assert dynamo.source_of(node) == dynamo.guard_source_of(node) == "" and dynamo.break_reason(gm) is None


# ---- frames ----------------------------------------------------------------------------------------------------------
def inner(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos()


class Outer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return inner(x).exp()


def test_frames_from_the_function_that_is_compiled_outwards() -> None:
    found: list[tuple[bool, str, bool, list[str]]] = []

    def look(gm: torch.fx.GraphModule) -> None:
        code, reason = dynamo.code_being_compiled(), dynamo.break_reason(gm)
        callers = [frame.f_code.co_name for frame in dynamo.frames_of_program()]
        found.append((reason.graph_break, code.co_name, dynamo.is_continuation(code), callers))
        if reason.graph_break:
            assert reason.user_stack[-1].name == "inner" and "graph_break" in reason.user_stack[-1].line
            assert isinstance(reason.reason, str)

    torch.compile(Outer(), backend=looking(look))(torch.ones(2))
    assert len(found) == 3
    first, rest, end = found
    assert first[0] and not first[2]
    assert not rest[0] and rest[2] and "inner" in rest[1] and rest[3]
    assert not end[0] and end[2] and "forward" in end[1]


def test_a_backend_has_the_frame_traced_again_as_another_program() -> None:
    graphs: list[torch.fx.GraphModule] = []

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def first() -> bool:
        return not graphs

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.sin().cos() if first() else x.exp()
        torch._dynamo.graph_break()
        return y + 1

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(gm)
        if len(graphs) == 1:
            raise dynamo.TraceOtherwise
        return gm

    assert torch.compile(program, backend=backend)(torch.zeros(1)).item() == 2.0
    assert len(graphs) == 3


def test_a_number_that_is_read_ends_a_graph_and_says_so() -> None:
    reasons: list[str] = []

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        reasons.append(str(dynamo.break_reason(gm).reason))
        return gm

    torch._dynamo.reset()
    torch.compile(lambda x: x.sum().item() + 1, backend=backend)(torch.ones(2))
    assert reasons[0].startswith(dynamo.NUMBER_BREAK)


def of_a_size(x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    return x[where.nonzero()[:, 0]].sum(0) + 1


def of_a_size_in_a_loop(x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = x + x[where.nonzero()[:, 0]].sum(0)
    return x


@pytest.mark.parametrize("in_vain", [False, True])
@pytest.mark.parametrize("program", [of_a_size, of_a_size_in_a_loop])
def test_a_frame_is_traced_again_with_other_settings(program: Any, in_vain: bool, monkeypatch: Any) -> None:
    """Whether it ended at a break or no graph came of it; and as it was where that fails, in whatever way."""
    names = ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")
    before = [getattr(torch._dynamo.config, name) for name in names]
    failed: list[Any] = []
    graphs: list[Any] = []

    def wanted(backends: Any, code: Any, error: Exception) -> bool:
        ended = isinstance(error, dynamo.EndedAt)
        assert backend in backends and ended == (program is of_a_size)
        return str(error).startswith(dynamo.SIZES_BREAK) and not failed

    settings = dynamo.Settings(wanted, failed.append, **dict.fromkeys(names, True))
    trace: Any = torch._dynamo.convert_frame.trace_frame

    def fails(*args: Any, **kwargs: Any) -> Any:
        if in_vain and settings.before:
            raise ValueError("an error of Dynamo's own")
        return trace(*args, **kwargs)

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        settings.off()
        graphs.append(gm)
        return gm

    monkeypatch.setattr(torch._dynamo.convert_frame, "trace_frame", fails)
    settings.install()
    torch._dynamo.reset()
    x, where = torch.ones(5, 2), torch.tensor([1, 0, 1, 1, 0])
    assert torch.equal(torch.compile(program, backend=backend)(x, where), program(x, where))
    assert failed == [program.__code__] * in_vain
    assert [getattr(torch._dynamo.config, name) for name in names] == before
    assert in_vain or ["nonzero" in str(gm.graph) for gm in graphs] == [True]


def test_a_call_before_each_trace_outlives_a_reset(monkeypatch: Any) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch._dynamo.convert_frame, "trace_frame", torch._dynamo.convert_frame.trace_frame)
    dynamo.before_each_trace(lambda: calls.append(1))
    for _ in range(2):
        torch._dynamo.reset()
        torch.compile(torch.sin, backend="eager")(torch.ones(3))
    assert len(calls) == 2


def test_the_backend_that_compiles_is_known_while_dynamo_traces() -> None:
    found: list[Any] = []
    frames: list[Any] = []

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def note() -> bool:
        found.extend(dynamo.backends_compiling())
        frames.append(dynamo.frame_being_compiled())
        return True

    def program(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if note() else x

    backend = looking(lambda gm: None)
    torch.compile(program, backend=backend, dynamic=False)(torch.ones(1))
    assert backend in found and frames == [program.__code__]
    assert dynamo.ASSOCIATIVE_SCAN.__name__ == "associative_scan" and dynamo.SCAN.__name__ == "scan"


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch has it, but younger")
def test_the_rest_behind_a_break_is_one_graph() -> None:
    wanted: list[bool] = []
    with patch.object(convert_frame, "trace_frame", convert_frame.trace_frame):
        dynamo.goes_on_behind_breaks(lambda backends: wanted[-1], lambda code, error: None)

        def callee(x: torch.Tensor) -> torch.Tensor:
            x = x.sin()
            torch._dynamo.graph_break()
            return x.cos()

        for nested, ends in ((False, [1, 1, 2]), (True, [1, 3])):
            counts: list[int] = []
            torch._dynamo.reset()
            wanted.append(nested)
            run = torch.compile(
                lambda x: callee(x).exp().tan(),
                backend=looking(lambda gm: counts.append(len(gm.graph.find_nodes(op="call_method")) + calls(gm))),  # noqa: B023
            )
            assert torch.allclose(run(torch.ones(2)), torch.ones(2).sin().cos().exp().tan())
            assert counts == ends


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch has it, but younger")
def test_a_break_in_a_comprehension_ends_the_graph_of_its_function() -> None:
    """Dynamo's continuation of a comprehension had lost what it iterates over (Python 3.11; later it is no frame)."""
    with (
        patch.object(convert_frame, "trace_frame", convert_frame.trace_frame),
        patch.object(NestedUserFunctionVariable, "should_allow_nested_graph_breaks", lambda self: True),
    ):
        dynamo.goes_on_behind_breaks(lambda backends: True, lambda code, error: None)

        def program(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
            return torch.cat([row[:size] for row, size in zip(x.sin(), sizes, strict=True)]).exp()

        torch._dynamo.reset()
        given = torch.ones(2, 3), torch.tensor([2, 3])
        assert torch.allclose(torch.compile(program, backend="eager")(*given), program(*given))


def calls(gm: torch.fx.GraphModule) -> int:
    return sum(node.op == "call_function" for node in gm.graph.nodes)


def test_a_function_and_a_subgraph_have_the_names_that_a_graph_has() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return 2 * gradient

    found = list[Any]()
    called = torch.compile(lambda x: Doubled.apply(x), backend=looking(lambda gm: found.extend(gm.graph.nodes)))
    called(torch.ones(2, requires_grad=True))
    [call] = [node for node in found if node.target is dynamo.AUTOGRAD_FUNCTION]
    assert "non_differentiable_idx" in call.kwargs
    assert dynamo.SUBGRAPH.name() == "invoke_subgraph"


def test_what_an_example_stands_for() -> None:
    class Example:
        real_obj = "mesh"

    assert dynamo.real_object(Example()) == "mesh" and dynamo.real_object(3) == 3


def test_what_a_trace_has_found_of_breaks_is_forgotten() -> None:
    log = SpeculationLog()
    log.entries.append(object())  # type: ignore[arg-type]
    dynamo.forget([3, log])
    assert not log.entries

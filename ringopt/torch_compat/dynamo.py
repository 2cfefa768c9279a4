"""Dynamo: its settings, its errors, and where it has a graph and its inputs from. Importing this imports all of it."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from types import CodeType, FrameType
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.modules.module
import torch.utils.hooks
from torch import fx
from torch._C._functorch import is_batchedtensor
from torch._dynamo import config, convert_frame, eval_frame
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._dynamo.exc import (
    BackendCompilerFailed,
    SpeculationRestartAnalysis,
    TensorifyScalarRestartAnalysis,
    TorchDynamoException,
    UnspecializeRestartAnalysis,
)
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.symbolic_convert import (
    InstructionTranslator,
    SpeculationLog,
    TensorifyState,
)
from torch._dynamo.utils import counters
from torch._dynamo.variables.functions import NestedUserFunctionVariable, UserFunctionVariable
from torch._higher_order_ops.associative_scan import associative_scan as ASSOCIATIVE_SCAN
from torch._higher_order_ops.scan import scan as SCAN

from ringopt.torch_compat.dynamo_memory import Remembered

__all__ = [
    "ASSOCIATIVE_SCAN",
    "AUTOGRAD_FUNCTION",
    "COMPARISONS",
    "NUMBER_BREAK",
    "SCAN",
    "SIZES_BREAK",
    "SUBGRAPH",
    "BackendCompilerFailed",
    "EndedAt",
    "Settings",
    "TensorifyScalarRestartAnalysis",
    "TensorifyState",
    "TorchDynamoException",
    "TraceOtherwise",
    "TransformGetItemToIndex",
    "aot_eager",
    "backends_compiling",
    "before_each_trace",
    "break_reason",
    "code_being_compiled",
    "counters",
    "forget",
    "frame_being_compiled",
    "frames_of_program",
    "goes_on_behind_breaks",
    "guard_source_of",
    "is_batchedtensor",
    "is_compiled",
    "is_continuation",
    "leave_graphs_whole_in_ddp",
    "opens_sizes_that_change",
    "patched",
    "real_object",
    "recompile_limit",
    "source_of",
]

# BackendCompilerFailed: what a backend raised, as its inner_exception. TorchDynamoException: every error of Dynamo's.
# TensorifyScalarRestartAnalysis: raised in a backend, has Dynamo trace the frame again, with the open floats that were
#     given to TensorifyState.specialize(name) fixed. TensorifyState.force_specializations: the set of these names, of
#     all frames, which AOTAutograd asks too, and clear() empties.
# TransformGetItemToIndex(): a mode in which a tensor is indexed by tensors without dims, as mods of flex_attention do.
# is_batchedtensor(x): whether a transform such as vmap runs over a dim of the tensor x.
# ASSOCIATIVE_SCAN(combine_fn, xs, dim, reverse=False, combine_mode="pointwise"), SCAN(combine_fn, init, xs, *, dim=0):
#     the functions that programs call.
# AUTOGRAD_FUNCTION(forward, backward, *operands, non_differentiable_idx=, saved_for_backward_idx=): as which a custom
#     autograd.Function stands in Dynamo's graph. forward(*operands) gives (results, saved); backward(*gradients of the
#     results, *saved) the gradient of each operand, or None.
# SUBGRAPH(graph, name, *operands): a graph that is called, which gives a tuple.
# counters: what compilers count, by compiler and by name.


class TraceOtherwise(UnspecializeRestartAnalysis, TensorifyScalarRestartAnalysis):
    """Raised in a backend, has Dynamo trace the frame again, and find another program there: that kind clears what it
    remembers of the first time, this is the one that backends may raise."""


# How Dynamo's reasons begin where it ends a graph at a size, or a number, that data decide.
ONLY_SIZES = "Attempted to call torch in-graph function on only torch.SymInt arguments"
SIZES_BREAK = ("Data dependent operator", "Dynamic shape operator", ONLY_SIZES)
NUMBER_BREAK = "Unsupported Tensor.item() call"

# As it writes a < b and its like, of tensors and of numbers.
COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
AUTOGRAD_FUNCTION = torch.ops.higher_order.autograd_function_apply
SUBGRAPH = torch.ops.higher_order.invoke_subgraph


def real_object(example: Any) -> Any:
    """Of an input of Dynamo's graph that is neither a tensor nor a number (a DeviceMesh): the object for which its
    example stands. From torch 2.13 on; before, Dynamo makes a constant of it."""
    return getattr(example, "real_obj", example)


class EndedAt(Exception):
    """A trace ended at a graph break, for this `reason`."""

    def __init__(self, reason: Any):
        self.reason = reason
        super().__init__(str(getattr(reason, "reason", "")))


class Settings:
    """Some of torch._dynamo.config, for frames that are traced once more: where `wanted(backends, code, error)` says so
    of an error that ended a trace, or a backend has turned them on. Where that fails, in whatever way, `failed` is
    called with the code, and the frame is traced a third time: with them once more where it says so, or without."""

    def __init__(
        self,
        wanted: Callable[[Iterator[Any], CodeType, Exception], bool],
        failed: Callable[[CodeType], bool],
        **settings: Any,
    ):
        self.wanted, self.failed, self.settings = wanted, failed, settings
        self.before: dict[str, Any] = {}
        self.installed = False

    def install(self) -> None:
        """For all frames from now on. Without effect where this torch has no such function."""
        trace = getattr(convert_frame, "trace_frame", None)
        if trace is not None and not self.installed:
            self.installed = True
            convert_frame.trace_frame = wraps(trace)(partial(self.traced, trace))

    @property
    def are_on(self) -> bool:
        return bool(self.before)

    def on(self) -> None:
        self.before = {name: getattr(config, name) for name in self.settings}
        for name, value in self.settings.items():
            setattr(config, name, value)

    def off(self) -> bool:
        """Whether they were on."""
        before, self.before = self.before, {}
        for name, value in before.items():
            setattr(config, name, value)
        return bool(before)

    def traced(self, trace: Callable[..., Any], code: CodeType, *args: Any, **kwargs: Any) -> Any:
        were_on = self.are_on
        try:
            made = trace(code, *args, **kwargs)
            reason = getattr(getattr(made, "output_graph", None), "compile_subgraph_reason", None)
            if not self.off() and getattr(reason, "graph_break", False):  # perhaps before there was anything to compile
                raise EndedAt(reason)
            return made
        except (SpeculationRestartAnalysis, TensorifyScalarRestartAnalysis) as again:
            if were_on and not (self.are_on or isinstance(again, TraceOtherwise)):  # a number is a constant now
                self.on()
            raise
        except Exception as error:
            if self.off():
                if self.failed(code):
                    self.on()
            elif self.wanted(wrapped_in(next(filter(callable, args), None)), code, error):
                self.on()
            elif isinstance(error, EndedAt):
                return made
            else:
                raise
            forget(args)
            raise TraceOtherwise from error


def forget(given: Sequence[Any]) -> None:
    """What a trace that was `given` these arguments has found of graph breaks, which are others the next time."""
    for log in given:
        if isinstance(log, SpeculationLog):
            log.clear()


def patched(**settings: Any) -> AbstractContextManager[Any]:
    """Other settings of torch._dynamo.config within the context."""
    return config.patch(settings)  # type: ignore[no-any-return]


def leave_graphs_whole_in_ddp() -> None:
    """From now on in this process: Dynamo would cut a graph in DDP where a bucket of gradients ends."""
    config.optimize_ddp = False


def before_each_trace(call: Callable[[], None]) -> None:
    """Has Dynamo call it before it traces a frame, for whatever backend, from here on; torch's own callbacks end with
    torch._dynamo.reset(). Without effect where this torch has no such function."""
    trace = getattr(convert_frame, "trace_frame", None)
    if trace is not None:

        @wraps(trace)
        def traced(*args: Any, **kwargs: Any) -> Any:
            call()
            return trace(*args, **kwargs)

        convert_frame.trace_frame = traced


def goes_on_behind_breaks(when: Callable[[Iterator[Any]], bool], failed: Callable[[CodeType, Exception], None]) -> None:
    """From here on, where `when(backends)`: behind a graph break in what a function calls, Dynamo traces the rest of
    both as one graph (torch's nested_graph_breaks), where the rest of the caller would be a graph of its own. A frame
    in which that fails within Dynamo is traced as before, once `failed` was called. Without effect before torch 2.13,
    where it is younger."""
    trace, without = getattr(convert_frame, "trace_frame", None), Remembered(WeakSet[CodeType])
    if trace is None or torch.__version__ < "2.13":
        return

    @wraps(trace)
    def traced(code: CodeType, *args: Any, **kwargs: Any) -> Any:
        if code in without() or not when(wrapped_in(next(filter(callable, args), None))):
            return trace(code, *args, **kwargs)
        try:
            with config.patch(nested_graph_breaks=True):
                return trace(code, *args, **kwargs)
        except TorchDynamoException:
            raise
        except Exception as error:
            without().add(code)
            failed(code, error)
            forget(args)
            raise TraceOtherwise from error

    convert_frame.trace_frame = traced
    for functions in (UserFunctionVariable, NestedUserFunctionVariable):
        _go_on_but_where_lost(functions)


def _go_on_but_where_lost(functions: Any) -> None:
    """Of functions of a kind."""
    allows = functions.should_allow_nested_graph_breaks
    functions.should_allow_nested_graph_breaks = lambda function: (
        not _is_lost_behind_breaks(function.get_code()) and allows(function)
    )


def _is_lost_behind_breaks(code: CodeType) -> bool:
    """Whether what goes on behind a break in it has lost something (in torch 2.13): a comprehension, which before
    Python 3.12 has a frame, its argument, whose name no program can have; what sets up hooks of a module's backward,
    the node of autograd that they are put on, which is another one where the rest is compiled."""
    return code.co_varnames[: code.co_argcount] == (".0",) or code.co_filename == torch.utils.hooks.__file__


def is_compiled(module: torch.nn.Module) -> bool:
    """By `module.compile`, in place."""
    return getattr(module, "_compiled_call_impl", None) is not None


def recompile_limit() -> int:
    """How many times Dynamo compiles one frame."""
    return int(config.recompile_limit)


def opens_sizes_that_change() -> bool:
    """Whether Dynamo leaves a size open because calls had others, and not because it was told to (dynamic=True)."""
    return bool(config.automatic_dynamic_shapes and config.assume_static_by_default)


def aot_eager(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    split: Callable[..., Any],
    ordered: Callable[[fx.GraphModule], None],
) -> Any:
    """torch's backend of that name, with `split` for its partitioner, and `ordered` called, in place, on the forward
    graph and on the backward one."""
    from torch._dynamo.backends import common, debugging

    def compiled(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        ordered(graph)
        return debugging.boxed_nop(graph, list(inputs))

    compilers = {"fw_compiler": compiled, "bw_compiler": compiled}
    backend = common.aot_autograd(**compilers, partition_fn=split, keep_inference_input_mutations=True)
    return backend(gm, list(example_inputs))


# ---- where an input of Dynamo's graph is from ------------------------------------------------------------------------
def source_of(placeholder: fx.Node) -> str:
    """The expression of the program that it stands for; "" where that is not known, as after the backend has run."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    return str(getattr(source, "name", ""))


def guard_source_of(placeholder: fx.Node) -> str:
    """What kind of place holds it: "GLOBAL...", "...NN_MODULE..." (a tensor of a model), "LOCAL"; "" where that is not
    known, and for a number that Dynamo has made a tensor of."""
    origin = placeholder.meta.get("grapharg")
    source = getattr(origin, "source", None) if not getattr(origin, "pass_arg_as_tensor", False) else None
    where = getattr(source, "guard_source", None)
    return str(getattr(where() if callable(where) else where, "name", ""))  # a method up to torch 2.12


def backends_compiling() -> Iterator[Any]:
    """The backend that Dynamo traces for now: what wraps it first, itself last."""
    yield from wrapped_in(InstructionTranslator.current_tx().output.compiler_fn)


def wrapped_in(found: Any) -> Iterator[Any]:
    """A backend, and what it wraps."""
    while found is not None:
        yield found
        wrapped = (getattr(found, name, None) for name in ("__wrapped__", "compiler_fn"))
        found = next((each for each in wrapped if each is not None), None)


# ---- the frames around a compilation ---------------------------------------------------------------------------------
def break_reason(gm: fx.GraphModule) -> Any:
    """Why Dynamo ended its graph: graph_break, reason, and user_stack, frames of the program, the last the innermost.
    None for a graph that Dynamo did not make."""
    return getattr(gm, "compile_subgraph_reason", None)


def code_being_compiled() -> CodeType:
    """The code of the frame of which Dynamo compiles a graph now."""
    code: CodeType = InstructionTranslator.current_tx().f_code
    return code


def frame_being_compiled() -> CodeType:
    """The same, of the outermost function, while Dynamo traces what is called in it."""
    code: CodeType = InstructionTranslator.current_tx().output.root_tx.f_code
    return code


def is_continuation(code: CodeType) -> bool:
    """Whether Dynamo made it of the rest of a function behind a graph break."""
    return code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX)


def frames_of_program() -> Iterator[FrameType]:
    """From the function being compiled outwards to the call of what torch.compile gave: the callers in between, the
    innermost first, without those by which torch.nn calls a module."""
    plumbing = torch.nn.modules.module.__file__
    frame = caller_of_compiler()
    while frame is not None and frame.f_code.co_filename != eval_frame.__file__:
        if frame.f_code.co_filename != plumbing:
            yield frame
        frame = frame.f_back


def caller_of_compiler() -> FrameType | None:
    """The innermost frame of the program that made Dynamo compile."""
    frame: FrameType | None = sys._getframe()
    last = None
    while frame is not None and frame.f_code.co_filename != eval_frame.__file__:
        if frame.f_code.co_filename == convert_frame.__file__:
            last = frame
        frame = frame.f_back
    return last.f_back if last is not None else None

"""A recurrence that an operator of another library computes, as a text beside its operands in a graph.

    kernel = ScanKernel.of(node, says)            kernel.text -> '{"op": "mylib::delta_rule.default", "xs": [...], ...}'
    outputs, last = ScanKernel.read(text).run(state, xs, others)

What a call is made of stays apart: the state, what has tokens (xs), other tensors, and values that are no tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.errors import first_line
from ringopt.ir.nodes import arguments_of, shape_of, value_of
from ringopt.ir.symbolic_sizes import is_open, same
from ringopt.rules.declare import ScanRule, operator_of
from ringopt.scans.affine import Stage
from ringopt.scans.segment_map import Frame
from ringopt.scans.state_axes import Axis
from ringopt.scans.trace import OperandKind
from ringopt.torch_compat.schema import overload_name, schema_of

# Functions with gradients of their own that compute what an operator computes, by its name: an operator hides what it
# is made of, so its backward computes its forward again.
FUNCTIONS: dict[str, Callable[..., Any]] = {}
PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class ScanKernel:
    """`op` by its name; `xs` and `others` are names of arguments, `given` the values of those that are no tensors.
    `state`, `last`, `dim`, `axes` are those of its rule, `additive` places among xs."""

    op: str
    xs: tuple[str, ...]
    others: tuple[str, ...]
    given: tuple[tuple[str, Any], ...]
    state: str
    last: int
    dim: int
    axes: tuple[Axis, ...] | None
    additive: tuple[int, ...]

    @classmethod
    def of(cls, node: fx.Node, says: ScanRule) -> ScanKernel:
        """Of a call that nothing contradicts."""
        given = arguments_of(node)
        tensors = [name for name, x in given.items() if isinstance(x, fx.Node)]
        xs = [name for name in says.tokens if name in tensors]
        return cls(
            f"{schema_of(node.target).name}.{overload_name(node.target)}",
            tuple(xs),
            tuple(name for name in tensors if name not in xs and name != says.state),
            tuple((name, x) for name, x in given.items() if name not in tensors and name != says.state),
            says.state,
            says.last,
            says.dim,
            says.axes,
            tuple(xs.index(name) for name in says.additive if name in xs),
        )

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    @lru_cache
    def read(cls, text: str) -> ScanKernel:
        found = json.loads(text)
        for name in ("xs", "others", "additive", "axes"):
            found[name] = tuple(found[name]) if found[name] is not None else None
        return cls(**{**found, "given": tuple((name, x) for name, x in found["given"])})

    def run(self, state: Tensor, *tensors: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """The results that have tokens, and the state behind the last of them; `tensors` are xs, then others."""
        function = FUNCTIONS.get(self.op) or operator_of(self.op)
        assert function is not None, self.op
        named = dict(zip((*self.xs, *self.others), tensors, strict=True))
        found = list(function(**named, **dict(self.given), **{self.state: state}))
        last = found.pop(self.last)
        return tuple(found), last


def frame_of(axes: Sequence[Axis], kind: OperandKind) -> Frame:
    """A state of `kind` that is M S + U of that before it."""
    nothing = fx.GraphModule(torch.nn.Module(), fx.Graph())
    return Frame(Stage(0, (), kind, "linear", nothing, nothing, tuple(axes)))


def contradiction(node: fx.Node, says: ScanRule) -> str:
    """Why a call is no such recurrence; "" where it is one."""
    given, results = arguments_of(node), value_of(node)
    if not isinstance(results, (tuple, list)) or not all(isinstance(x, Tensor) for x in results):
        return "its rule says that one result is the last state, and it does not give several tensors"
    if not 0 <= says.last < len(results) or len(results) < 2:
        return f"its rule says that result {says.last} is the last state, and it has {len(results)}"
    odd = [name for name, x in given.items() if not isinstance(x, (fx.Node, *PLAIN))]
    odd += [name for name, x in given.items() if isinstance(x, fx.Node) and not isinstance(value_of(x), Tensor)]
    if odd:
        return f"its argument {odd[0]} is neither a tensor nor a plain number"
    state, last, dim = given[says.state], results[says.last], says.dim
    shape = list(last.shape)
    if state is not None and not all(map(same, shape_of(state), shape)):
        return f"the state before is {list(shape_of(state))}, and the one behind {shape}"
    if says.axes is not None and len(says.axes) != len(shape):
        return f"its rule has {len(says.axes)} axes for a state of {len(shape)} dims"
    if any(map(is_open, shape)):
        return f"its state {shape} has an open size"
    xs = {name: value_of(given[name]) for name in says.tokens if isinstance(given[name], fx.Node)}
    xs |= {f"result {at}": x for at, x in enumerate(results) if at != says.last}
    tokens = {name: x.shape[dim] if x.dim() > dim else None for name, x in xs.items()}
    first = next(iter(tokens.values()))
    if first is None or not all(size is not None and same(size, first) for size in tokens.values()):
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in xs.items())
        return f"there are not equally many tokens along dim {dim} of {shapes}"
    return "" if is_open(first) or first < 2 else halved(node, says, first // 2)


def halved(node: fx.Node, says: ScanRule, tokens: int) -> str:
    """What the operator, by its fake kernel, gives of fewer tokens than it should; "" where all is as it should."""
    kernel, given, last = ScanKernel.of(node, says), arguments_of(node), value_of(node)[says.last]
    values = [value_of(given[name]) for name in (*kernel.xs, *kernel.others)]
    with next(x.fake_mode for x in values), torch.no_grad():
        xs = [x.narrow(says.dim, 0, tokens) for x in values[: len(kernel.xs)]]
        try:
            outputs, state = kernel.run(torch.empty_like(last), *xs, *values[len(xs) :])
        except Exception as error:  # of whatever kind: it is a user's kernel
            return f"on {tokens} tokens it fails: {first_line(error)}"
    odd = [list(x.shape) for x in outputs if x.shape[says.dim] != tokens]
    if odd or state.shape != last.shape:
        return f"of {tokens} tokens it gives {odd[0] if odd else f'a state of {list(state.shape)}'}"
    return ""

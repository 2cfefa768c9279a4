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
    segments: str | None = None  # None in a call without packed sequences too

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
            packed_by(node, says),
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

    def run(
        self, state: Tensor, *tensors: Tensor, at: tuple[int, int] | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """The results that have tokens, and the state behind the last of them; `tensors` are xs, then others. `at`:
        which tokens of the sequence they are, where several are packed."""
        function, given = FUNCTIONS.get(self.op) or operator_of(self.op), list(tensors)
        if at is None or self.segments is None:
            return self.called(function, state, *tensors)
        place = (*self.xs, *self.others).index(self.segments)
        given[place], states = within(tensors[place], state, *at)
        outputs, last = self.called(function, states, *given)
        return outputs, last[-state.shape[0] :]

    def fake(self, state: Tensor, *tensors: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Of fake tensors, which a kernel does not take."""
        return self.called(operator_of(self.op), state, *tensors)

    def called(
        self, function: Callable[..., Any] | None, state: Tensor, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """What the operator, or the function in its place, gives."""
        assert function is not None, self.op
        named = dict(zip((*self.xs, *self.others), tensors, strict=True))
        found = list(function(**named, **dict(self.given), **{self.state: state}))
        last = found.pop(self.last)
        return tuple(found), last


def within(segments: Tensor, state: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """What tells packed sequences apart among tokens `first` to `last`, and the states before them: only the first goes
    on, from `state`, where it has not begun there."""
    if segments.dim() == 1:
        inside = segments[(segments > first) & (segments < last)] - first
        ends = torch.cat([inside.new_zeros(1), inside, inside.new_full((1,), last - first)])
        begins = (segments == first).any()
        return ends, torch.cat([state.masked_fill(begins, 0), state.new_zeros(len(inside), *state.shape[1:])])
    here, before = segments[:, first:last], segments[:, first - 1 : first] if first else 0
    return here - here[:, :1] + (here[:, :1] != before).to(here.dtype), state


def packed_by(node: fx.Node, says: ScanRule) -> str | None:
    """The argument of a call that tells packed sequences apart."""
    return says.segments if says.segments and arguments_of(node)[says.segments] is not None else None


def state_of(node: fx.Node, says: ScanRule) -> Tensor:
    """A fake value like the state that goes on from token to token: of the last packed sequence, not of each."""
    last: Tensor = value_of(node)[says.last]
    by = packed_by(node, says)
    each = by is not None and value_of(arguments_of(node)[by]).dim() == 1
    return last.new_empty((1, *last.shape[1:])) if each else last


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
    odd = [name for name, x in given.items() if not isinstance(x, fx.Node) and not is_plain(x)]
    odd += [name for name, x in given.items() if isinstance(x, fx.Node) and not isinstance(value_of(x), Tensor)]
    if odd:
        return f"its argument {odd[0]} is neither a tensor nor a number"
    state, last, dim = given[says.state], state_of(node, says), says.dim
    shape = list(last.shape)
    if packed_by(node, says) is not None and (state is not None or state_is_read(node, says)):
        return "it packs sequences, and reads states before or behind them"
    if state is not None and not all(map(same, shape_of(state), shape)):
        return f"the state before is {list(shape_of(state))}, and the one behind {shape}"
    if says.axes is not None and len(says.axes) != len(shape):
        return f"its rule has {len(says.axes)} axes for a state of {len(shape)} dims"
    if says.axes is not None and any(map(is_open, shape)):  # its maps are of fixed sizes
        return f"its state {shape} has an open size"
    xs = {name: value_of(given[name]) for name in says.tokens if isinstance(given[name], fx.Node)}
    xs |= {f"result {at}": x for at, x in enumerate(results) if at != says.last}
    tokens = {name: x.shape[dim] if x.dim() > dim else None for name, x in xs.items()}
    first = next(iter(tokens.values()))
    if first is None or not all(size is not None and same(size, first) for size in tokens.values()):
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in xs.items())
        return f"there are not equally many tokens along dim {dim} of {shapes}"
    return "" if is_open(first) or first < 2 else halved(node, says, first // 2)


def state_is_read(node: fx.Node, says: ScanRule) -> bool:
    """Whether anybody reads the last state."""
    return any(user.args[1] % len(value_of(node)) == says.last and user.users for user in node.users)


def is_plain(x: Any) -> bool:
    """Whether a text can hold it: a number, a string, nothing, several of those."""
    return isinstance(x, PLAIN) or (isinstance(x, (tuple, list)) and all(isinstance(part, PLAIN) for part in x))


def halved(node: fx.Node, says: ScanRule, tokens: int) -> str:
    """What the operator, by its fake kernel, gives of fewer tokens than it should; "" where all is as it should."""
    kernel, given, last = ScanKernel.of(node, says), arguments_of(node), value_of(node)[says.last]
    values = [value_of(given[name]) for name in (*kernel.xs, *kernel.others)]
    with next(x.fake_mode for x in values), torch.no_grad():
        xs = [x.narrow(says.dim, 0, tokens) for x in values[: len(kernel.xs)]]
        try:
            outputs, state = kernel.fake(torch.empty_like(last), *xs, *values[len(xs) :])
        except Exception as error:  # of whatever kind: it is a user's kernel
            return f"on {tokens} tokens it fails: {first_line(error)}"
    odd = [list(x.shape) for x in outputs if x.shape[says.dim] != tokens]
    if odd or state.shape != last.shape:
        return f"of {tokens} tokens it gives {odd[0] if odd else f'a state of {list(state.shape)}'}"
    return ""

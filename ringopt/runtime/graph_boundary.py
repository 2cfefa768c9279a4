"""Where values enter and leave a compiled graph that is spread over ranks.

Inside, a value is replicated or this rank's rows; outside, a program sees whole tensors. Outputs that stay on their
ranks leave as lazy whole tensors; a lazy tensor that enters another graph brings its rows along, so that nothing is
gathered between two graphs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.fx as fx

from ringopt.distributed.mesh import Mesh, PretendedMesh
from ringopt.errors import OptionError
from ringopt.ir.nodes import is_tensor, shape_of
from ringopt.ir.notes import CONTENT, PARAMETER, WHY_LEFT
from ringopt.ir.placement import Spread, same_rows
from ringopt.ir.symbolic_sizes import SymbolPlaces, at_hand
from ringopt.pipeline import Context
from ringopt.report import Gather, bytes_text
from ringopt.tensor.lazy import Lazy, cut, local_rows, spread, whole
from ringopt.torch_compat import dynamo
from ringopt.torch_compat.tracing import TracingContext


class Boundary:
    """`run` with `given`, the inputs taken as rows, and `left`, the outputs that are not gathered; by place. Sizes of
    `left` may be formulas, whose `symbols` a call has."""

    def __init__(
        self, run: Callable[..., Any], given: Mapping[int, Spread], left: Mapping[int, Spread], symbols: SymbolPlaces
    ) -> None:
        self.run, self.given, self.left, self.symbols = run, given, left, symbols

    def __call__(self, *inputs: Any) -> Any:
        outputs = self.run(*enter(inputs, self.given))
        if not self.left:
            return outputs
        number = self.symbols.reader(inputs)
        left = {i: how.with_sizes(number) for i, how in self.left.items()}
        return tuple(spread(out, left[i]) if i in left else out for i, out in enumerate(outputs))


def enter(inputs: Sequence[Any], given: Mapping[int, Spread]) -> list[Any]:
    """What the graph is called with: rows at the places `given`, plain whole tensors elsewhere."""

    def plain(i: int, x: Any) -> Any:
        if isinstance(x, Lazy) and i in given and same_rows(x.shard.spread, given[i]):
            return local_rows(x)
        x = whole(x) if isinstance(x, Lazy) else x
        return cut(given[i], x) if i in given else x

    return [plain(i, x) for i, x in enumerate(inputs)]


def examples(inputs: Sequence[Any], given: Mapping[int, Spread]) -> list[Any]:
    """What the graph is compiled for. Dynamo does not know the rows: to the compilers below, which share its symbols,
    they come as fake tensors of fixed sizes."""
    context = TracingContext.try_get()
    mode = context.fake_mode if context is not None else None

    def fixed(i: int, x: Any) -> Any:
        taken = mode is not None and isinstance(inputs[i], Lazy)
        return mode.from_tensor(x, static_shapes=True) if taken and mode is not None else x

    return [fixed(i, x) for i, x in enumerate(enter(inputs, given))]


def arriving(inputs: Sequence[Any], mesh: Mesh) -> dict[int, Spread]:
    """The inputs whose rows are spread over the ranks of `mesh`, by place."""
    lazy = {i: x.shard.spread for i, x in enumerate(inputs) if isinstance(x, Lazy)}
    return {i: where for i, where in lazy.items() if where.group == mesh.name and mesh.size > 1}


def check_arrivals(context: Context, inputs: Sequence[fx.Node]) -> None:
    """With inputs="local" attention over whole inputs is a mistake, but for a dry run. Raises OptionError."""
    dry = isinstance(context.mesh, PretendedMesh)
    if context.options.inputs == "global" or context.given or dry or not context.shards:
        return
    kept = {node for node in inputs if node.meta.get(PARAMETER) or CONTENT in node.meta}
    found = [
        f"{node.name} {list(map(at_hand, shape_of(node)))}" for node in inputs if is_tensor(node) and node not in kept
    ]
    raise OptionError(
        f"option inputs='local': no input comes in rows; found {', '.join(found)}. Which of them carry the sequence, "
        "and along which dim, has to be said: pass each as ringopt.from_rows(x, dim)"
    )


# Of Dynamo's graphs, for it is there only when they are compiled first.
_ends: WeakKeyDictionary[fx.GraphModule, bool] = WeakKeyDictionary()


def ends_program(gm: fx.GraphModule) -> bool:
    """Whether what Dynamo's graph returns is what the compiled function returns: no break follows, in this function or
    in one that called it. False when in doubt."""
    if gm not in _ends:
        _ends[gm] = no_break_follows(gm)
    return _ends[gm]


def no_break_follows(gm: fx.GraphModule) -> bool:
    """Whether the program returns what this graph returns: Dynamo stopped at the end of the function, and so did each
    function that resumed after an earlier graph break."""
    reason = dynamo.break_reason(gm)
    if reason is None or reason.graph_break:
        return False
    callee = dynamo.code_being_compiled()
    for caller in dynamo.frames_of_program():
        if not dynamo.is_continuation(callee):
            return False
        callee = caller.f_code  # which returns what its continuation does
    return True


def break_after(gm: fx.GraphModule, gathers: Sequence[Gather], lazy: int) -> tuple[str, ...]:
    """For the report: that Dynamo's graph ends at a graph break, torch's own reason for it and its line, and what
    was gathered for what runs there; `lazy` values are left to whoever reads them."""
    reason = dynamo.break_reason(gm)
    if reason is None or not reason.graph_break:
        return ()
    why = str(reason.reason).strip().splitlines()[0]
    frame = reason.user_stack[-1] if reason.user_stack else None
    where = f" ({os.path.basename(frame.filename)}:{frame.lineno}: {frame.line})" if frame is not None else ""
    over = [gather for gather in gathers if gather.op == "output"]
    size = bytes_text(sum(gather.bytes for gather in over))
    crossing = [f"{len(over)} values cross it whole, gathered: {size}"] if over else []
    crossing += [f"{lazy} cross it in rows, gathered if they are read there"] if lazy else []
    left = f"; {gm.meta[WHY_LEFT]}" if gm.meta.get(WHY_LEFT) else ""
    return (f"ends at a graph break: {why}{where}{left}; {', '.join(crossing) or 'nothing is gathered for it'}",)

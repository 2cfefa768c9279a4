"""What `ringopt::picked` computes, at sizes that are numbers: for the table of traits.

How many tokens are picked is known when the program runs. Here they are shared evenly by all that pick some.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.dims.op_families import SPLITS
from ringopt.dims.searches import ITEMS, is_search, sized_by
from ringopt.errors import first_line
from ringopt.ir.nodes import named, op_name
from ringopt.ops.sized_call import Open
from ringopt.scans.body import from_text
from ringopt.scans.trace import in_own_thread
from ringopt.torch_compat.fake_tensors import FakeTensorMode, without_error_log

Kind = tuple[tuple[int, ...], torch.dtype]


def picked_evenly(text: str, operands: tuple[Kind, ...]) -> fx.Graph:
    """The body with the value of every node. Raises Open."""
    found = _picked_evenly(text, operands)
    if isinstance(found, str):
        raise Open(found)
    return found


@lru_cache(maxsize=256)
def _picked_evenly(text: str, operands: tuple[Kind, ...]) -> fx.Graph | str:
    """Or why there is none."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(from_text(text).module.graph, {}))
    run = Evenly(fx.GraphModule({}, graph))

    def twice() -> None:
        with FakeTensorMode(), torch.no_grad(), without_error_log():
            for _ in range(2):  # the first counts the masks
                run.run(*(torch.empty(shape, dtype=dtype) for shape, dtype in operands))
                run.share = len(run.masks)

    try:
        in_own_thread(twice)
    except RuntimeError as error:  # what is picked by several has to be as much as what others pick
        return f"what the data pick: {first_line(error)}"
    return graph


class Evenly(fx.Interpreter):
    """Runs the body; each of the `masks` picks one part of `share`."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module, garbage_collect_values=False)
        self.masks, self.share = set[fx.Node](), 1

    def run_node(self, n: fx.Node) -> Any:
        n.meta["val"] = value = self.called(n) if n.op == "call_function" else super().run_node(n)
        return value

    def called(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if is_search(n):
            found = self.places(n.args[0], args[0])
            return torch.stack(found, 1) if op_name(n) == "nonzero" else found
        if op_name(n) in ITEMS:
            return 1
        if op_name(n) in SPLITS and sized_by(n) is not None:
            return args[0].tensor_split(len(args[1]), named(n, "dim"))
        if op_name(n) in ("index", "index_put"):
            parts = zip(n.args[1], args[1], strict=True)
            args = (args[0], [place for node, at in parts for place in self.index(node, at)], *args[2:])
        if op_name(n) == "bincount":
            weights = args[1] if len(args) > 1 else None
            return torch.empty(max(1, named(n, "minlength")), dtype=args[0].dtype if weights is None else weights.dtype)
        return n.target(*args, **kwargs)

    def index(self, node: Any, at: Tensor | None) -> list[Tensor | None]:
        if at is None or at.dtype not in (torch.bool, torch.uint8):
            return [at]
        return [*self.places(node, at)]

    def places(self, node: fx.Node, mask: Tensor) -> list[Tensor]:
        """As many as this mask's share; one number for each of its dims."""
        self.masks.add(node)
        rows = max(1, mask.numel() // self.share)
        return [torch.empty(rows, dtype=torch.long) for _ in range(mask.ndim)]

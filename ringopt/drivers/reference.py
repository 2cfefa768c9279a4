"""What `verify=True` compares a program with that draws random numbers by position: torch's own stream has others.

    as written    capture, normalize, find_substitution, find_scan, canonicalize, draw_by_position: no pass has found
                  attention in it. Recurrences are scans, and triangular systems solved, for the order of a graph, and
                  so of its seeds, follows from what is in it
    found         all that one process runs, where attention that is found has other numbers than the program: weights
                  are dropped by (batch, head, query, key), or options dilate it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from ringopt.distributed.lookup import mesh_of
from ringopt.drivers.compile import transform
from ringopt.frontend.capture import capture
from ringopt.frontend.dynamic_shapes import with_sizes_at_hand
from ringopt.options import Options
from ringopt.passes import with_options
from ringopt.passes.canonicalize import Canonicalize
from ringopt.passes.draw_by_position import DrawByPosition
from ringopt.passes.find_scan import FindScan
from ringopt.passes.find_substitution import FindSubstitution
from ringopt.passes.normalize import Normalize
from ringopt.pipeline import Context, Pipeline
from ringopt.scans.call import is_scan
from ringopt.tensor.lazy import Lazy
from ringopt.torch_compat.autograd import unseen

AS_WRITTEN = (Normalize(), FindSubstitution(), FindScan(), Canonicalize(), DrawByPosition())


@dataclass(frozen=True)
class Reference:
    """`program` is whole, for inputs of the sizes at hand; `found`: what of it is as passes have found it, "" where all
    is as written."""

    program: fx.GraphModule
    found: str = ""


def reference(gm: fx.GraphModule, inputs: Sequence[Any], options: Options, drawn: Sequence[str]) -> Reference:
    """The reference of a graph whose compiled form has the draws `drawn`: each by the name that canonicalize gave it,
    in the order of their seeds."""
    plain = replace(options, mesh=None, inputs="global", outputs="gather", dump=None, trace=None, on_refusal="ignore")
    mesh = mesh_of("pretend:0/1")
    with unseen():
        whole = [hollow(x) if isinstance(x, Lazy) else x for x in with_sizes_at_hand(inputs)]
        context = Context(plain, mesh)
        flat = capture(gm, whole).begin(context)
        Pipeline(with_options(AS_WRITTEN, plain), logged=False).run(flat, context)
        if context.drawn == drawn and not options.dilates:
            scans = any(map(is_scan, flat.graph.nodes))
            return Reference(flat, "its recurrences are scans" if scans else "")
        alone = transform(gm, whole, plain, mesh, anew=True).graph
    assert alone is not None, "what draws by position is a graph on one process too"
    return Reference(alone, "options dilate its attention" if options.dilates else "its attention drops weights")


def hollow(x: Lazy) -> torch.Tensor:
    """A tensor of the whole size, whose numbers nobody reads."""
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return made.requires_grad_(x.requires_grad)

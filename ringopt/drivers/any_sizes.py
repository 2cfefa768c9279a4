"""Whether a graph for any sizes is better than one for those at hand.

Dynamo makes a graph for the sizes of the first call, and one for any sizes when a second call has others. Most programs
are sharded alike by both. Of some the second has more that every rank does whole, or gathers more: a picture whose rows
and columns are tokens has h * w of them, which are shared by rows where h is a number. A few sizes are worth a graph
each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.fx as fx
from torch import Tensor

from ringopt.distributed.mesh import Mesh
from ringopt.frontend.dynamic_shapes import shape_env_of
from ringopt.reporting.figures import MatrixWork
from ringopt.torch_compat.dynamo import opens_sizes_that_change, recompile_limit
from ringopt.torch_compat.tensors import is_marked_dynamic
from ringopt.torch_compat.tracing import compilation_of_frame

# A graph of its own is for sizes with which a rank does no more than this part of the work.
WORTH = 0.9


def may_be_fixed(gm: fx.GraphModule, example_inputs: Sequence[Any], mesh: Mesh) -> bool:
    """Whether the open sizes of `gm` are Dynamo's idea, and it will make another graph for the next ones: half of those
    that it allows are left for programs with many lengths."""
    before = compilation_of_frame()
    if mesh.size == 1 or not before or before >= recompile_limit() // 2 or not opens_sizes_that_change():
        return False
    marked = any(isinstance(x, Tensor) and is_marked_dynamic(x) for x in example_inputs)
    return shape_env_of(gm) is not None and not marked


def is_much_whole(work: MatrixWork | None, ranks: int) -> bool:
    """Whether a rank would do much less if all of it were shared; so may be one that was refused for any sizes."""
    return work is None or work.total / ranks < WORTH * work.per_rank(ranks)


def saves_work(fixed: MatrixWork | None, work: MatrixWork | None, ranks: int) -> bool:
    """Whether the graph for the sizes at hand has less work a rank than that for any, by what every rank does whole and
    what is gathered."""
    if fixed is None:
        return False
    work = work or MatrixWork(fixed.total, fixed.total)
    return replace(fixed, total=work.total).per_rank(ranks) < WORTH * work.per_rank(ranks)

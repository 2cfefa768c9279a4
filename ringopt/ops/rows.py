"""`ringopt::rows_here`: how many rows of a sequence this rank holds, asked when the program runs.

    rows_here(length, layout, group) -> int

A program for any number of ranks has no local sizes in its text. This number is an open size in it (an unbacked symbol),
and every local size follows from it.
"""

from __future__ import annotations

import torch

from ringopt.attention.layouts import LAYOUTS, layout_of
from ringopt.attention.rows import count
from ringopt.distributed.mesh import mesh_of
from ringopt.errors import PlanError


@torch.library.custom_op("ringopt::rows_here", mutates_args=())
def rows_here(length: int, layout: str, group: str) -> int:
    """Raises PlanError, on every rank alike, where some rank would have too few rows."""
    mesh = mesh_of(group)
    plan = layout_of(layout, length, mesh.size)
    least = LAYOUTS[layout].chunks_per_rank * mesh.size
    if mesh.size > 1 and length < least:
        raise PlanError(
            f"this program has a {layout} sequence of {length} rows, and {mesh.size} ranks need {least}: run it on fewer"
        )
    return count(plan.ranges(mesh.rank))


@rows_here.register_fake
def _(length: int, layout: str, group: str) -> int:
    return torch.library.get_ctx().new_dynamic_size(min=0)  # type: ignore[return-value]

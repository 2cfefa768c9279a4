"""`ringopt.from_rows`: for loaders that hand each rank only its rows of a batch.

ids, labels = (ringopt.from_rows(x, dim=1) for x in rows_of_batch)     # [B, S_local] -> [B, S], lazily
loss = model(input_ids=ids, labels=labels).loss                        # the model sees whole sequences

What a program computes from rows it cannot tell from what it would compute from a short sequence (position ids, masks,
sizes that are written into the graph). So it is given whole tensors, whose rows stay where they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ringopt.arguments import check_layout, dim_of
from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.context_parallel.geometry.rows import count
from ringopt.distributed.consistency import digest
from ringopt.distributed.lookup import process_mesh
from ringopt.distributed.mesh import Mesh, register
from ringopt.errors import OptionError, RingMismatchError
from ringopt.ir.placement import Sharded, Spread
from ringopt.tensor.lazy import spread

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MOST_DIMS = 8  # the header that the ranks compare has a fixed size


def from_rows(x: Tensor, dim: int, *, mesh: DeviceMesh | Mesh | None = None, layout: str = "contiguous") -> Tensor:
    """The whole tensor of which every rank passes its rows along `dim`, cut as `layout` says; nothing is gathered.

    It is a lazy tensor: a function compiled with backend="ring" over the same ranks takes the rows as they are, anybody
    else who reads it gathers it, on all ranks alike. Rows of one sequence (ids, labels, position ids, masks) are cut
    alike, labels at the same rows as ids. Differentiable: each rank has the gradient of its rows. Every call compares
    the sizes over the ranks. Raises OptionError, and on every rank RingMismatchError where sizes are not those of one
    tensor.
    """
    dim = dim_of("from_rows", x, dim)
    if x.dim() > MOST_DIMS:
        raise OptionError(f"from_rows of a tensor of {x.dim()} dims; expected one of at most {MOST_DIMS}")
    check_layout(layout)
    if mesh is None and not (dist.is_available() and dist.is_initialized()):
        return x
    ranks = mesh if isinstance(mesh, Mesh) else process_mesh(mesh)
    register(ranks)
    if ranks.size == 1:
        return x
    ranks.meet_on(x.device)
    length = agreed_length(ranks, x, dim, layout)
    size = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    stride = torch.empty(size, device="meta").stride()
    name = f"an input of sizes {list(size)} that came in rows"
    return spread(x.contiguous(), Spread(Sharded(dim, 1, length, 1), layout, ranks.name, size, stride, name))


def agreed_length(mesh: Mesh, x: Tensor, dim: int, layout: str) -> int:
    """Rows of the whole sequence, by what all ranks hold."""
    others = [size for place, size in enumerate(x.shape) if place != dim]
    fields = [x.dim(), dim, *digest(f"{x.dtype} {layout}".encode()), *others]
    header = torch.tensor([x.shape[dim], *fields, *[0] * (MOST_DIMS - len(others))], device=mesh.device)
    headers = mesh.all_gather(header, "from_rows")
    if not all(torch.equal(headers[0][1:], other[1:]) for other in headers):
        raise RingMismatchError(
            f"from_rows: the ranks do not pass rows of one tensor; rank {mesh.rank} has {list(x.shape)} {x.dtype}, "
            f"dim={dim}, layout={layout!r}. All but the size along dim must be equal on all ranks"
        )
    counts = [int(other[0]) for other in headers]
    total = sum(counts)
    expected = [count(layout_of(layout, total, mesh.size).ranges(rank)) for rank in range(mesh.size)] if total else []
    if counts != expected:
        raise RingMismatchError(
            f"from_rows: the ranks hold {counts} rows, and a {layout} sequence of {total} is cut into {expected}. Cut "
            "it as ringopt.shard does, or pass the layout it was cut with"
        )
    return total

"""What is wrong with the operands of an attention over the ranks: values, because all ranks must hear of it before they
stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ringopt.context_parallel.executor.operands import Operands
from ringopt.context_parallel.geometry.layouts import Layout
from ringopt.context_parallel.geometry.rows import count
from ringopt.context_parallel.plan.head_exchange import HeadExchange
from ringopt.context_parallel.plan.plan_of import Plan
from ringopt.distributed.mesh import Mesh
from ringopt.errors import RingMismatchError
from ringopt.expr.mask import Mask
from ringopt.hardware.to_host import to_host


def misfit_of_expansion(given: Operands, mask: Mask, plan: Plan) -> str:
    """Where K and V are made of what travels: by such a plan, and from such rows."""
    if given.expansion is None:
        return ""
    k, v = given.k, given.v
    if isinstance(plan, HeadExchange) or plan.queries_move:
        return "what K and V are made of travels only where keys travel"
    if mask.nan and (plan.pattern.blind or any(term is not None for term in mask.terms)):
        return "rows may be NaN because they see no key, which K and V that are made of others do not show"
    if k.shape[:2] != (1, 1) or v.shape[:2] != (1, 1) or k.shape[2] != v.shape[2] or v.shape[3]:
        sizes = f"{list(k.shape)} and {list(v.shape)}"
        return f"k and v are {sizes}; where K and V are made of them they are [1, 1, S, L] and [1, 1, S, 0]"
    return ""


def misfit_of(given: Operands, q_layout: Layout, kv_layout: Layout, rank: int) -> str:
    """What is wrong with the shards, or "". A value, because all ranks must hear of it before they stop."""
    q, k, v = given.q, given.k, given.v
    misfit = misfit_of_rows({"q": q}, q_layout, rank) or misfit_of_rows({"k": k, "v": v}, kv_layout, rank)
    if misfit:
        return misfit
    if given.expansion is not None:
        return "" if q.dtype == k.dtype == v.dtype else alike(q, k, v)
    grouped = k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
    if not grouped or k.shape[:3] != v.shape[:3] or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        return f"q, k, v are {list(q.shape)}, {list(k.shape)}, {list(v.shape)}, which is no attention"
    if not q.dtype == k.dtype == v.dtype:
        return alike(q, k, v)
    return ""


def alike(q: Tensor, k: Tensor, v: Tensor) -> str:
    """They are not."""
    return f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; they must be of one dtype"


def misfit_of_rows(shards: Mapping[str, Tensor], layout: Layout, rank: int) -> str:
    """Of shards by name, of one layout."""
    rows = count(layout.ranges(rank))
    for name, shard in shards.items():
        if shard.dim() != 4 or shard.shape[2] != rows:
            return (
                f"{name} is {list(shard.shape)}, and rank {rank} of {layout.ranks} holds {rows} rows (dim 2) of a "
                f"{layout.name} sequence of {layout.length}; cut it with ringopt.shard, or pass its layout"
            )
    return ""


def misfit_of_sources(sources: Sequence[Tensor], mask: Mask, rows: int) -> str:
    """Of those that hold the rank's rows only."""
    for number, dim in mask.row_dims.items():
        if sources[number].shape[dim] != rows:
            return (
                f"source {number} of the mask is {list(sources[number].shape)}, and this rank holds {rows} rows of the "
                f"queries (dim {dim}); cut it as the queries are"
            )
    return ""


def misfit_of_extras(given: Operands, dropout_p: float) -> str:
    """Of sinks and dropout."""
    (batch, heads), sinks, seed = given.q.shape[:2], given.sinks, given.seed
    if sinks is not None and list(sinks.shape) not in ([1, heads], [batch, heads]):
        return f"sinks are {list(sinks.shape)}, and {batch} x {heads} heads take [1, {heads}] or [{batch}, {heads}]"
    if not 0 <= dropout_p <= 1 or (dropout_p > 0 and seed is None):
        return f"dropout_p is {dropout_p}, seed {seed}; a probability is from 0 to 1, and above 0 takes a seed"
    if seed is not None and (seed.dtype != torch.int64 or seed.dim()):
        return f"the seed is {list(seed.shape)} {seed.dtype}; it must be int64 without dims"
    return ""


def agree_on_seeds(mesh: Mesh, seeds: Tensor) -> Tensor:
    """The seeds to draw by, of rank 0, compared over the ranks at every call: generators that ran apart would have
    every rank draw others, and no error. Raises RingMismatchError on all ranks alike.

    On a device the comparison is read when the next seeds are agreed on, or before gradients of these draws are made
    (`settle_seeds`), so that nothing waits for it: until then all ranks draw alike, by those of rank 0."""
    settle_seeds(mesh)
    found = mesh.all_gather(seeds.detach().to(mesh.device).reshape(-1), "seed")
    mesh.seeds_arriving = to_host([torch.stack(found)])
    if is_host(mesh.device):
        settle_seeds(mesh)
        return seeds
    return found[0].view(seeds.shape)


def is_host(device: torch.device) -> bool:
    """Whether to read a number there waits for nothing."""
    return device.type == "cpu"


def settle_seeds(mesh: Mesh) -> None:
    """Compares the seeds that the ranks have told each other, if that is still to be done."""
    arriving, mesh.seeds_arriving = mesh.seeds_arriving, None
    if arriving is None:
        return
    found = arriving()[0].tolist()
    if any(each != found[0] for each in found):
        place = next(place for place, seeds_there in enumerate(zip(*found, strict=True)) if len({*seeds_there}) > 1)
        shown = [each[place] for each in found]
        raise RingMismatchError(
            f"the ranks draw random numbers by seeds {shown}, and must do so by one. Seed the random number generators "
            "of all ranks alike, and draw from them alike"
        )

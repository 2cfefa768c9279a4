"""`ringopt::rows_here`: how many rows of a sequence this rank holds, asked when the program runs.

    rows_here(length, layout, group, inputs, names, program, when, least) -> int

A program for any number of ranks has no local sizes in its text. This number is an open size in it (an unbacked
symbol), of `least` or more, and every local size follows from it. Before it answers, the ranks compare `inputs`, called
`names`, and `program`, a digest of the whole text: every rank must pass the same full batch to the same program.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ringopt.context_parallel.geometry.layouts import layout_of, parsed
from ringopt.context_parallel.geometry.rows import count
from ringopt.distributed.consistency import compare_ranks, digest
from ringopt.distributed.lookup import mesh_of
from ringopt.distributed.mesh import Mesh
from ringopt.distributed.roll_call.batch import Batch, begin_batch
from ringopt.errors import PlanError
from ringopt.ops.tags import ON_HOST
from ringopt.torch_compat.symbolic_shapes import unbacked_size

# Which programs a mesh has been asked about. Ranks that are threads of one process share a mesh, hence the rank.
_compared: WeakKeyDictionary[Mesh, set[tuple[int, str]]] = WeakKeyDictionary()


@torch.library.custom_op(
    "ringopt::rows_here",
    mutates_args=(),
    tags=ON_HOST,
    schema="(SymInt length, str layout, str group, Tensor[] inputs, str names, str program, str when, "
    "int least=1) -> SymInt",
)
def rows_here(
    length: int, layout: str, group: str, inputs: list[Tensor], names: str, program: str, when: str, least: int = 1
) -> int:
    """`names` are parted by commas; `when` is as the option check_inputs. Raises, on every rank alike,
    RingMismatchError where they differ (of a digest: before the next message) and PlanError where some rank would have
    too few rows."""
    mesh = mesh_of(group)
    if mesh.size == 1 and length > 0:
        return length
    known, asked = (mesh.rank, program), _compared.setdefault(mesh, set())
    first = known not in asked
    if names and (when == "always" or (when != "never" and first)):
        compare_ranks(mesh, digest(program.encode()), names.split(","), inputs)
        asked.add(known)
    check_enough(length, layout, mesh.size)
    if names and when == "every" and not first:
        begin_batch(mesh, Batch.of(digest(program.encode())[0], names.split(","), inputs, {}))
    return count(layout_of(layout, length, mesh.size).ranges(mesh.rank))


@rows_here.register_fake
def _(
    length: int, layout: str, group: str, inputs: list[Tensor], names: str, program: str, when: str, least: int = 1
) -> int:
    return unbacked_size(minimum=least)  # type: ignore[return-value]


def check_enough(length: int, layout: str, ranks: int) -> None:
    """Raises PlanError where some of the ranks would have too few rows."""
    cut = parsed(layout)
    parts, least = cut.parts(length), cut.kind.chunks_per_rank * ranks
    if parts < least:
        units = f"{parts} units of {cut.rows} rows" if cut.rows > 1 else f"{length} rows"
        raise PlanError(f"this program has a {layout} sequence of {units}, and {ranks} ranks need {least}; use fewer")

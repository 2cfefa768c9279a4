"""A triangular system that is solved row by row becomes one solve.

    for i in range(1, c):
        T[i, :i] = L[i, :i] + (L[i, :i, None] * T[:i, :i]).sum(-2)        # unrolled: some ten nodes a row
        ->
    T = linalg_solve_triangular(-L, L)

Found and proved in ringopt/recognize/scans/substitution.py. After: same numbers but for rounding; the size of the graph
does not depend on the rows. Other writes to a square matrix are no system and stay, which is nothing to refuse, so this
pass does not match, check and rewrite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from ringopt.ir.constants import Constants
from ringopt.pipeline import Context, Pass
from ringopt.recognize.scans.substitution import substitution, writes_part


@dataclass(frozen=True)
class FindSubstitution(Pass):
    """Rewrites forward substitution as a triangular solve."""

    name = "find_substitution"
    reads = ("values",)
    writes = ("relied_on",)
    optional = True
    lost = "triangular systems that are solved row by row stay unrolled, some ten nodes a row"

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        writes = [node for node in gm.graph.nodes if writes_part(node)]
        constants = Constants(gm.graph, context.values, context.relied_on) if writes else None
        for node in writes:
            found = substitution(node, constants) if constants is not None else None
            if found is not None:
                found.rewrite(gm.graph)

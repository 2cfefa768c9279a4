"""Which layout each sequence of a graph has: that in which all its sites together are predicted to take least time."""

from __future__ import annotations

from collections.abc import Mapping

import torch.fx as fx

from ringopt.calls import AttentionCall
from ringopt.context_parallel.geometry.dilation import is_dilated
from ringopt.context_parallel.geometry.layouts import LAYOUTS
from ringopt.context_parallel.plan.plan_of import on_nodes
from ringopt.cost.choose import Case, choose_layout, choose_layouts
from ringopt.cost.dilated_site import dilated_layout
from ringopt.cost.site import case_of, lengths, looked_at, rates_for
from ringopt.distributed.mesh import ANY, Mesh
from ringopt.errors import OptionError
from ringopt.hardware.rates import Rates
from ringopt.ir.placement import Layouts
from ringopt.ir.site import SiteInfo
from ringopt.ir.symbolic_sizes import at_hand, formula
from ringopt.options import SiteOptions


def layouts_for(
    sites: Mapping[fx.Node, SiteInfo],
    options: SiteOptions,
    mesh: Mesh,
    given: set[str],
    carries: Mapping[fx.Node, bool],
) -> tuple[Layouts, str]:
    """The layout of each sequence, and why; `given` are those of the inputs that arrive in rows. Raises OptionError
    where the one that is asked for cannot be."""
    ranks, asked = mesh.size, options.layout
    spread = [node for node, info in sites.items() if not info.whole]
    cut = (max(lengths(node, mesh)) if info.whole else min(lengths(node, mesh)) for node, info in sites.items())
    shortest = min(cut, default=0)
    enough = shortest >= 2 * ranks
    if asked == "zigzag" and sites and not enough:
        raise OptionError(
            f'option layout="zigzag": the shortest sequence has {at_hand(shortest)} rows, and zigzag over {ranks} '
            f'ranks needs {2 * ranks}. Use layout="contiguous" or "auto"'
        )
    if asked != "auto":
        return Layouts(asked), ""
    if len(given) == 1 and (enough or not sites) and options.strategy != "halo":
        return Layouts(min(given)), ""
    thinned = [node for node in spread if is_dilated(AttentionCall.of(node).pattern)]
    rates, dilated = rates_for(mesh, *sites) if spread else None, bool(thinned)
    if rates is None or (dilated and not enough):
        return Layouts(), ""
    if len(thinned) == len(spread):
        name, why = dilated_layout({node: sites[node] for node in spread}, options, looked_at(mesh), rates)
        return Layouts(name), why
    cases = [case_of(node, mesh, options.kernel, carries) for node in spread if node not in thinned]
    name, why = "contiguous", ""
    if enough:
        name, why = choose_layout(cases, looked_at(mesh), on_nodes(options.strategy, mesh), tuple(LAYOUTS), rates)
    if dilated or mesh.name == ANY:
        return Layouts(name), why
    of_sites = {node: case_of(node, mesh, options.kernel, carries) for node in spread}
    return layouts_of_axes(Layouts(name), why, of_sites, mesh, on_nodes(options.strategy, mesh), rates)


def layouts_of_axes(
    one: Layouts, why: str, cases: Mapping[fx.Node, Case], mesh: Mesh, strategy: str, rates: Rates
) -> tuple[Layouts, str]:
    """Of sequences of several lengths, each its own; `one` and `why` are those of all of them together."""
    every = [length for node in cases for length in lengths(node, mesh)]
    decided = [bool(length >= 2 * mesh.size) for length in every]  # before formulas: it may fix a length
    axes = {formula(length): length for length in every}
    if len(axes) == 1:
        return one, why
    enough = {formula(length): long for length, long in zip(every, decided, strict=True)}
    sites = [(case, *map(formula, lengths(node, mesh))) for node, case in cases.items()]
    chosen, reason = choose_layouts(one.name, sites, enough, looked_at(mesh), strategy, rates)
    return Layouts(one.name, tuple((axes[axis], layout) for axis, layout in chosen.items())), reason or why

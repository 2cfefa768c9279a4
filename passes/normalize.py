"""A functional graph: no writes, no grad or autocast regions, no assertions about metadata.

    y.add_(1)                             ->   y1 = add(y, 1), later uses of y read y1
    y[:, 0].fill_(0)                      ->   y1 = select_scatter(y, full_like(select(y, 1, 0), 0), 1, 0)
    with no_grad: f(x)                    ->   f(detach(x))
    with autocast(bf16): linear(x, w)     ->   linear(to(x, bf16), to(w, bf16))
    multiply(x, y), swapaxes(x, 0, 1)     ->   mul(x, y), transpose(x, 0, 1)
    atleast_2d(x, y)                      ->   atleast_2d(x), atleast_2d(y)
    dropout(x, 0.1, False)                ->   x
    type_as(x, y), x.view_as(y), x.T      ->   to(x, bf16), reshape(x, [2, 3]), permute(x, [1, 0])
    x.as_strided([3], [2])                ->   as_strided(reshape(x, [-1]), [3], [2])
    x[hidden] = 0                         ->   masked_fill(x, hidden, 0)
    rand_like(x)                          ->   rand([2, 3])
    cat([torch.tensor([]), x], -2)        ->   clone(x)
    mylib::attend(q, k, v)                ->   scaled_dot_product_attention(q, k, v), where a rule says so

After: no mutable op but the final copy_ into inputs the program changes, so a value may be read anywhere. Moving a read
past a write, or a producer out of its no_grad region, is what makes hoisting lose or leak gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from ringopt.dims.declared_attention import spell_declared
from ringopt.frontend.explicit_autocast import Uncastable, explicit_casts
from ringopt.frontend.explicit_no_grad import ExplicitDetach
from ringopt.frontend.functionalize import Functional, Unwritable, views_by_value
from ringopt.frontend.plain_spelling import each_by_itself, rename_synonyms, spell_plainly
from ringopt.ir.autograd_function import CustomGradient, HigherOrder, custom_gradients
from ringopt.ir.memory import written_rows
from ringopt.ir.nodes import op_name
from ringopt.ir.refusal import GraphRefused, Refusal
from ringopt.pipeline import Context, Pass
from ringopt.torch_compat.schema import OpOverload

aten = torch.ops.aten


@dataclass(frozen=True)
class Normalize(Pass):
    """Makes the graph functional: no writes, no regions of autocast or no_grad, one spelling of each op."""

    name = "normalize"
    reads = ("given",)

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        spell_declared(gm.graph)
        refuse_unknown_calls(gm.graph)
        rename_synonyms(gm.graph)
        each_by_itself(gm.graph)
        try:
            views_by_value(gm.graph)
            ExplicitDetach(gm.graph).rewrite()
            explicit_casts(gm)
            Functional(gm.graph).rewrite()
        except (Uncastable, Unwritable) as problem:
            raise GraphRefused(problem.refusal) from problem
        refusal = written_rows(gm.graph, context.given)
        if refusal is not None:
            raise GraphRefused(refusal)
        spell_plainly(gm.graph)
        for node in custom_gradients(gm.graph):
            # With the autocast region that is around the call around the backward too, as torch.compile has it
            # (torch._functorch.config.backward_pass_autocast).
            self.run(node.target.backward, context)


PYTHON_CALLS = ("getitem", "_set_grad_enabled", "_enter_autocast", "_exit_autocast")


def refuse_unknown_calls(graph: fx.Graph) -> None:
    """Raises GraphRefused for a call of anything but an ATen operator, or one of a few functions of Python."""
    for node in graph.nodes:
        plain = isinstance(node.target, (OpOverload, CustomGradient, HigherOrder)) or op_name(node) in PYTHON_CALLS
        if node.op in ("call_module", "call_method") or (node.op == "call_function" and not plain):
            raise GraphRefused(Refusal(f"{node.target} is no ATen operator: what it does to rows is not known", node))

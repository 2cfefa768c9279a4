"""An operator `ringopt_kernels::name` that runs what Dynamo does not trace, with its gradient and its rule.

The backward computes the forward again, with a graph of autograd: no function says which tensors its backward needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ringopt.rules.declare import REGISTRY, SHIPPED, Decide, rule
from ringopt.torch_compat.autograd import never_compiled, recording
from ringopt.torch_compat.tensors import storage_key

LIBRARY = "ringopt_kernels"

Results = Tensor | tuple[Tensor, ...]
Behind = Callable[..., Sequence[Tensor]]


def define(
    name: str, schema: str, results: int, run: Callable[..., Results], fake: Callable[..., Results], says: Decide,
    behind: Behind | None = None,
) -> None:  # fmt: skip
    """`run`, with as many `results`, is called without a graph of autograd, and with one in the backward. `behind` can
    take that one's place: of gradients of the results, which arguments want one, and these."""

    def forward(*args: Any) -> Results:
        with torch.no_grad():  # a Function records whatever the dispatcher excludes
            return run(*args)

    def again(grads: list[Tensor], wanted: list[int], *args: Any) -> list[Tensor]:
        with recording():
            leaves = [x.detach() if isinstance(x, Tensor) else x for x in args]
            learned = [leaves[at].requires_grad_() for at in wanted]
            outs = run(*leaves)
            pairs = zip([outs] if isinstance(outs, Tensor) else outs, grads, strict=True)
            found = [(x, grad.to(x.dtype)) for x, grad in pairs if x.requires_grad]
            if not found:  # a kernel without a backward
                return [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in learned]
            reached, given = zip(*found, strict=True)
            how = {"allow_unused": True, "materialize_grads": True}
            slopes = torch.autograd.grad(reached, learned, given, **how)
        return apart([x.contiguous() for x in slopes], [*grads, *(x for x in args if isinstance(x, Tensor))])

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.values = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.tensors = [at for at, x in enumerate(inputs) if isinstance(x, Tensor)]
        ctx.save_for_backward(*(inputs[at] for at in ctx.tensors))

    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        args = list(ctx.values)
        for at, x in zip(ctx.tensors, ctx.saved_tensors, strict=True):
            args[at] = x
        wanted = [at for at, x in enumerate(args) if ctx.needs_input_grad[at]]
        found = dict(zip(wanted, operator_behind(list(grads), wanted, *args), strict=True))
        return tuple(found.get(at) for at in range(len(args)))

    name, both = f"{LIBRARY}::{name}", {"mutates_args": ()}
    returned = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
    op = torch.library.custom_op(name, forward, **both, schema=f"({schema}) -> {returned}")
    back = f"(Tensor[] grads, int[] wanted, {schema}) -> Tensor[]"
    operator_behind = torch.library.custom_op(f"{name}_backward", behind or again, **both, schema=back)
    op.register_fake(fake)
    operator_behind.register_fake(lambda grads, wanted, *args: [args[at].new_empty(args[at].shape) for at in wanted])
    op.register_autograd(never_compiled(backward), setup_context=setup)
    with REGISTRY.filling(SHIPPED):
        rule(name)(says)


def apart(results: list[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """Results of an operator share no memory with each other, or with what it was given."""
    taken, found = {storage_key(x) for x in given}, []
    for x in results:
        found.append(x.clone() if storage_key(x) in taken else x)
        taken.add(storage_key(x))
    return found


def defined(name: str) -> Any:
    """The operator."""
    return getattr(getattr(torch.ops, LIBRARY), name).default

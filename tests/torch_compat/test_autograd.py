"""Autograd from within."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ringopt.torch_compat.autograd import (
    ENTER_INFERENCE_MODE,
    EXIT_INFERENCE_MODE,
    GET_DATA,
    CachingTorchDispatchMode,
    StopRecomputationError,
    at_end_of_backward,
    autocast_is_on,
    current_backward,
    has_tangent,
    never_compiled,
    no_autocast,
    of_strand,
    recording,
    unseen,
    without_hooks,
)


def test_what_is_never_compiled_runs_as_it_is_where_dynamo_watches() -> None:
    seen = []

    @never_compiled
    def compiling(x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    assert torch.compile(lambda x: compiling(x.sin()).cos(), backend="eager")(torch.zeros(1)) == torch.ones(1).cos()
    assert seen == [False]


class Asking(torch.autograd.Function):
    """Calls `ask` in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ask: Any) -> Tensor:
        ctx.ask = ask
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.ask()
        return gradients[0], None


def backward(ask: Any) -> None:
    x: Tensor = Asking.apply(torch.ones(1, requires_grad=True), ask)  # type: ignore[no-untyped-call]
    x.sum().backward()


def test_a_forward_mode_gradient_is_seen_on_its_level() -> None:
    x = torch.ones(2)
    assert not has_tangent(x)
    with forward_ad.dual_level():
        assert not has_tangent(x) and not has_tangent(2)
        assert has_tangent(forward_ad.make_dual(x, x))
    assert not has_tangent(x)


def test_a_backward_has_a_number_while_it_runs() -> None:
    found: list[int | None] = []
    assert current_backward() is None
    backward(lambda: found.append(current_backward()))
    backward(lambda: found.append(current_backward()))
    assert None not in found and len(set(found)) == 2 and current_backward() is None


def test_a_callback_runs_when_the_backward_ends() -> None:
    order: list[str] = []

    def ask() -> None:
        at_end_of_backward(lambda: order.append("end"))
        order.append("backward")

    backward(ask)
    assert order == ["backward", "end"]


def test_a_callback_of_a_backward_that_fails_is_freed() -> None:
    ended: list[str] = []

    class Callback:
        def __call__(self) -> None:
            ended.append("called")

        def __del__(self) -> None:
            ended.append("freed")

    def ask() -> None:
        at_end_of_backward(Callback())
        raise ValueError("cut short")

    with pytest.raises(ValueError, match="cut short"):
        backward(ask)
    assert ended == ["freed"]


def test_an_object_is_kept_for_the_thread_and_its_backwards() -> None:
    key, found = "ringopt test of_strand", list[object]()
    mine = of_strand(key, object)
    backward(lambda: found.append(of_strand(key, object)))
    other = threading.Thread(target=lambda: found.append(of_strand(key, object)))
    other.start()
    other.join()
    assert of_strand(key, object) is mine and found[0] is mine and found[1] is not mine


def test_hooks_of_the_program_do_not_see_what_is_beside_it() -> None:
    packed: list[Tensor] = []
    x = torch.ones(2, requires_grad=True)

    def pack(saved: Tensor) -> Tensor:
        packed.append(saved)
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved):
        with unseen():
            x.sin()
        assert not packed
        x.sin()
    assert len(packed) == 1
    with disable_saved_tensors_hooks("none here"), unseen():
        x.sin()
    with unseen(), disable_saved_tensors_hooks("none is there, for the program has none"):
        x.sin()
    with saved_tensors_hooks(pack, lambda saved: saved):
        with unseen(), without_hooks(), disable_saved_tensors_hooks("none is there"):
            x.sin()
        with without_hooks():  # of the program's own
            x.sin()
    assert len(packed) == 2


def test_what_is_computed_again_stops_by_an_error() -> None:
    raised: list[BaseException] = []

    def region(x: Tensor) -> Tensor:
        try:
            return x.sin().cos().exp()
        except BaseException as error:
            raised.append(error)
            raise

    x = torch.ones(2, requires_grad=True)
    checkpoint(region, x, use_reentrant=False).sum().backward()
    assert [type(error) for error in raised] in ([StopRecomputationError], [])
    assert issubclass(StopRecomputationError, Exception)


def test_the_first_context_of_a_selective_checkpoint_asks_the_policy() -> None:
    from torch.utils.checkpoint import CheckpointPolicy

    asked: list[Any] = []

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append(operator)
        return CheckpointPolicy.MUST_SAVE

    forward, _again = create_selective_checkpoint_contexts(policy)
    assert isinstance(forward, CachingTorchDispatchMode)
    forward.ac_graph_id = 3
    with forward:
        torch.ones(2).sin()
    assert torch.ops.aten.sin.default in asked


def test_what_dynamos_graph_calls_for_data_and_inference_mode() -> None:
    targets: list[Any] = []

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        targets.extend(node.target for node in gm.graph.nodes if node.op == "call_function")
        return gm

    def program(x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = x.sin()
        return y + x.data

    torch.compile(program, backend=backend, fullgraph=True)(torch.ones(2))
    assert {GET_DATA, ENTER_INFERENCE_MODE, EXIT_INFERENCE_MODE} <= set(targets)


def test_autograd_records_within_an_operator() -> None:
    found: list[bool] = []

    @torch.library.custom_op("ringopt_test::inside", mutates_args=())
    def inside(x: Tensor) -> Tensor:
        with torch.enable_grad():
            found.append(x.detach().requires_grad_().sin().requires_grad)
        with recording():
            found.append(x.detach().requires_grad_().sin().requires_grad)
        return x.clone()

    inside(torch.ones(2))
    assert found == [False, True]


def test_autocast_is_told_and_switched_off() -> None:
    x = torch.ones(2, 2)
    assert not autocast_is_on()
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_is_on() and (x @ x).dtype == torch.bfloat16
        with no_autocast():
            assert (x @ x).dtype == torch.float32

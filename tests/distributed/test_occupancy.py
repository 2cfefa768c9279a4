"""One thread at a time inside a mesh: a second is an error on all ranks, and what belongs to the first is no second."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import ringopt
from ringopt.distributed.lookup import DEFAULT_TIMEOUT, process_mesh
from ringopt.distributed.occupancy import Occupancy, strand
from ringopt.distributed.process import ProcessMesh
from ringopt.errors import RingCommError, RingThreadError
from tests.distributed.reading import needs_reading

Ranks = Callable[..., list[Any]]

KINDS = ("forward", "backward", "eager")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.inner(x)[:, None]
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0]


def blocks(timeout: float, mesh: DeviceMesh | None = None) -> tuple[Any, Any, torch.Tensor]:
    """A compiled block, the same in eager, and an input."""
    torch.manual_seed(0)
    alone, options = Block(), {"inner_backend": "aot_eager", "timeout": timeout, "mesh": mesh}
    compiled = torch.compile(alone, backend="ring", options=options, dynamic=False)
    return compiled, alone, torch.randn(2, 8, 8, dtype=torch.float64, requires_grad=True)


class Gate:
    """Where a thread stops until it is let through; only while it is shut."""

    def __init__(self) -> None:
        self.shut_for: threading.Thread | None = None
        self.reached, self.opened = threading.Event(), threading.Event()

    def pass_through(self, *_: Any) -> None:
        if threading.current_thread() is self.shut_for:
            self.reached.set()
            assert self.opened.wait(60)


def doing(kind: str, compiled: Any, x: torch.Tensor, gate: Gate) -> Callable[[], Any]:
    """What a thread does, and where it stops."""
    if kind == "backward":
        between = compiled(x)
        between.register_hook(gate.pass_through)  # the backward of the second call has begun then, and is not over
        return compiled(between).sum().backward
    if kind == "eager":
        mine = ringopt.shard(x.detach()[:, None], 2)
        return lambda: ringopt.attention(mine, mine, mine)
    return lambda: compiled(x)


def caught(found: dict[str, str], name: str, call: Callable[[], Any]) -> None:
    try:
        call()
        found[name] = "nothing"
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"


def crowd(first: str, second: str, ranks_with_two: list[int], timeout: float) -> dict[str, str]:
    compiled, _, x = blocks(timeout)
    compiled(x).sum().backward()
    mesh, gate, found = process_mesh(), Gate(), dict[str, str]()
    begin = mesh.begin_program
    mesh.begin_program = lambda: (gate.pass_through(), begin())[1]  # type: ignore[method-assign]
    one, other = doing(first, compiled, x, gate), doing(second, compiled, x, Gate())
    a = threading.Thread(target=caught, args=(found, "first", one), name="one")
    b = threading.Thread(target=caught, args=(found, "second", other), name="other")
    if dist.get_rank() in ranks_with_two:
        gate.shut_for = a
        a.start()
        assert gate.reached.wait(60)
        b.start()
        b.join(60)
        gate.opened.set()
    else:
        a.start()
    a.join(60)
    caught(found, "later", lambda: compiled(x))
    process_mesh(timeout_s=DEFAULT_TIMEOUT)  # for the tests that follow on these ranks
    return found


PAIRS = [(first, second) for first in KINDS for second in KINDS]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_second_thread_is_an_error_for_both(ranks: Ranks, first: str, second: str) -> None:
    timeout = 100.0 + PAIRS.index((first, second))  # a mesh for each
    for rank, found in enumerate(ranks(2, crowd, first, second, [0, 1], timeout)):
        start = f"RingThreadError: rank {rank} of 2 (world): threads 'one' and 'other' were inside the mesh at the same"
        assert sorted(found) == ["first", "later", "second"]
        for said in found.values():
            assert said.startswith(start), found
            assert "options={'mesh': DeviceMesh.from_group(group, " in said and "one thread at a time" in said


@needs_reading
def test_a_second_thread_on_one_rank_ends_the_others(ranks: Ranks) -> None:
    here, there = ranks(2, crowd, "forward", "forward", [0], 120.0)
    assert all(said.startswith("RingThreadError") for said in here.values())
    assert there["first"].startswith("RingCommError") and "Connection closed by rank 0" in there["first"]


# ---- what stays right ------------------------------------------------------------------------------------------------
def in_threads(*calls: Callable[[], Any], at_once: bool) -> None:
    errors: list[BaseException] = []

    def run(call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
        if not at_once:
            thread.join()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def same(compiled: Any, alone: Any, x: torch.Tensor) -> None:
    (got,) = torch.autograd.grad(compiled(x).square().sum(), x)
    (expected,) = torch.autograd.grad(alone(x).square().sum(), x)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def one_after_the_other() -> None:
    compiled, alone, x = blocks(130.0)
    in_threads(*[lambda: same(compiled, alone, x)] * 4, at_once=False)
    out: list[torch.Tensor] = []
    in_threads(lambda: out.append(compiled(x)), lambda: out[0].sum().backward(), at_once=False)
    process_mesh(timeout_s=DEFAULT_TIMEOUT)


def test_calls_and_backwards_one_after_the_other_in_any_thread(ranks: Ranks) -> None:
    ranks(2, one_after_the_other)


def meshes_of_their_own() -> list[str]:
    meshes = [None, *(DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=(name,)) for name in "ab")]
    models = [blocks(DEFAULT_TIMEOUT, mesh) for mesh in meshes]
    for compiled, _, x in models:
        compiled(x).sum().backward()

    def work(number: int) -> None:
        compiled, alone, _ = models[number]
        for step in range(10):
            drawn = torch.Generator().manual_seed(100 * number + step)  # the default generator is that of all threads
            same(compiled, alone, torch.randn(2, 8, 8, dtype=torch.float64, requires_grad=True, generator=drawn))

    in_threads(*(partial(work, number) for number in range(3)), at_once=True)
    return [process_mesh(mesh).name for mesh in meshes]


@pytest.mark.zoo
def test_models_in_threads_with_meshes_of_their_own(ranks: Ranks) -> None:
    assert ranks(2, meshes_of_their_own) == [["world", "world (2)", "world (3)"]] * 2


def made_crosswise() -> str:
    groups = [dist.new_group() for _ in range(2)]
    chosen = DeviceMesh.from_group(groups[dist.get_rank()], "cpu")
    with pytest.raises(ringopt.errors.RingMismatchError) as raised:
        process_mesh(chosen, 140.0)
    return str(raised.value)


def test_meshes_made_in_different_orders_are_refused(ranks: Ranks) -> None:
    for said in ranks(2, made_crosswise):
        assert "make another mesh of the same ranks" in said and "before the threads start" in said


def computed_again() -> None:
    """A compiled block in a checkpoint, both kinds: its recomputation is in the backward, reentrant in another one."""
    compiled, alone, x = blocks(150.0)
    for reentrant in (False, True):
        again = lambda x: checkpoint(compiled, x, use_reentrant=reentrant)  # noqa: B023, E731
        same(again, alone, x) if not reentrant else None
        y, z = (x.detach().clone().requires_grad_() for _ in range(2))
        again(y).square().sum().backward()
        alone(z).square().sum().backward()
        torch.testing.assert_close(y.grad, z.grad, rtol=1e-12, atol=1e-12)
    mesh = process_mesh()
    assert isinstance(mesh, ProcessMesh) and mesh._occupancy._inside is None
    process_mesh(timeout_s=DEFAULT_TIMEOUT)


def test_what_a_checkpoint_computes_again_is_no_stranger(ranks: Ranks) -> None:
    ranks(2, computed_again)


def backward_that_raises() -> None:
    """In a thread, on all ranks; another thread goes on."""
    compiled, alone, x = blocks(160.0)

    def failing() -> None:
        between = compiled(x)
        between.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            compiled(between).sum().backward()

    in_threads(failing, lambda: same(compiled, alone, x), at_once=False)
    process_mesh(timeout_s=DEFAULT_TIMEOUT)


def test_a_backward_that_failed_is_left(ranks: Ranks) -> None:
    ranks(2, backward_that_raises)


# ---- threads of the engine -------------------------------------------------------------------------------------------
class Deep(torch.autograd.Function):
    """Its backward runs another, as often as told: beyond 60 levels in other threads of the engine."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, levels: int, note: Callable[[], None]) -> torch.Tensor:
        ctx.levels, ctx.note = levels, note
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.note()
        if ctx.levels:
            with torch.enable_grad():
                Deep.apply(torch.ones(1, requires_grad=True), ctx.levels - 1, ctx.note).sum().backward()
        return grad, None, None


@pytest.mark.parametrize("known", [True, False])
def test_threads_of_the_engine_belong_to_the_thread_that_called_it(known: bool) -> None:
    """Also where it has never been in a mesh before."""
    occupancy, threads, strands = Occupancy(), set[int](), set[int]()

    def note() -> None:
        assert occupancy.enter() is None
        occupancy.leave()
        threads.add(threading.get_ident())
        strands.add(id(strand()))

    def backward() -> None:
        if known:
            strand()
        Deep.apply(torch.ones(1, requires_grad=True), 130, note).sum().backward()

    in_threads(backward, at_once=False)
    assert len(threads) == 3 and len(strands) == 1
    assert occupancy._inside is None and occupancy._depth == 0


def test_a_backward_is_inside_from_its_first_message_to_its_end() -> None:
    """Between two messages too, when none of them is under way. It ends once, however often it has entered."""
    occupancy, found = Occupancy(), list[bool]()

    def ask_from_outside() -> None:
        def ask() -> None:
            found.append(occupancy.enter() is None)
            if found[-1]:
                occupancy.leave()

        in_threads(ask, at_once=False)

    def message(_: torch.Tensor) -> None:
        assert occupancy.enter() is None
        occupancy.leave()
        ask_from_outside()

    x = torch.ones(1, requires_grad=True)
    y = x * 2
    for value in (x, y):
        value.register_hook(message)
    y.backward()
    assert found == [False, False], "of two messages"
    ask_from_outside()
    assert found[-1], "the backward is over"


def test_errors_are_those_of_communication() -> None:
    assert issubclass(RingThreadError, RingCommError)

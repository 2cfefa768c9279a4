"""Inductor as a compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor.loop_body import LoopBodyBlock

from ringopt.torch_compat import inductor
from ringopt.torch_compat.aot_autograd import mark_boxed


def test_a_graph_is_compiled_with_settings_in_the_place_of_generated_code() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def inner_compile(graph: torch.fx.GraphModule, _inputs: Any, **_settings: Any) -> Any:
        graphs.append(graph)

        def run(arguments: list[Any]) -> Any:
            values = list(arguments)
            arguments.clear()
            return graph(*values)

        return mark_boxed(run)

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return inductor.compile_fx(gm, inputs, {"max_autotune": False}, inner_compile)

    x = torch.ones(3)
    assert torch.allclose(torch.compile(lambda x: x.sin() + 1, backend=backend)(x), x.sin() + 1)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("x", "transposed"),
    [
        (torch.empty(2, 3, 4), False),
        (torch.empty(2, 4, 3).mT, True),
        (torch.empty(2, 4, 1).mT, False),  # a dim of one element is anywhere
        (torch.empty(2, 3, 9)[..., :4], False),  # a view with gaps, whose strides follow from what it views
        (torch.empty(2, 9, 3)[:, :4].mT, False),
    ],
)
def test_what_is_transposed_in_memory(x: torch.Tensor, transposed: bool) -> None:
    assert inductor.is_transposed(x.shape, x.stride()) == transposed


def test_dims_in_an_order() -> None:
    x = torch.randn(2, 3, 4)
    found = inductor.in_order(x, [0, 2, 1])
    assert torch.equal(found, x) and found.stride() == torch.empty(2, 4, 3).mT.stride()
    torch.library.opcheck(torch.ops.ringopt_inductor.in_order.default, (found, [0, 2, 1]))


def test_a_mode_stands_for_settings() -> None:
    assert inductor.list_mode_options("max-autotune")["max_autotune"] is True


@pytest.mark.zoo
def test_code_for_a_hash_is_not_generated_exponentially(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a chain in which each step reads the one before twice."""
    operations: list[int] = []
    begin = LoopBodyBlock.__init__

    def counted(block: Any, *args: Any) -> None:
        begin(block, *args)
        operations.append(len(block.graph.nodes))

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = (x ^ (x >> 3)) * 5
        return x

    def compiled(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return inductor.compile_fx(gm, inputs, inductor.hash_settings())

    monkeypatch.setattr(LoopBodyBlock, "__init__", counted)
    x = torch.arange(8)
    # In an empty folder programs would be compiled that ask for vector units.
    with inductor.fresh_cache(), inductor.patched(**{"cpp.simdlen": 1}):
        assert torch.equal(torch.compile(chain, backend=compiled)(x), chain(x))
    assert 36 < sum(operations) < 12_000


def test_settings_for_hashes_leave_the_users_alone() -> None:
    with inductor.patched(realize_opcount_threshold=12):
        assert inductor.hash_settings() == {}


def test_a_setting_by_name() -> None:
    with inductor.patched(realize_opcount_threshold=12):
        assert inductor.setting("realize_opcount_threshold") == 12


def test_random_numbers_are_drawn_as_in_eager_where_it_is_set() -> None:
    assert not inductor.draws_as_eager()
    with inductor.patched(fallback_random=True):
        assert inductor.draws_as_eager()
    assert not inductor.draws_as_eager()


def test_decompositions_are_by_operator() -> None:
    table = inductor.select_decomp_table()
    assert torch.ops.aten.addmm.default in table or torch.ops.aten.log_softmax.int in table
    assert all(callable(form) for form in table.values())


def test_a_cache_of_its_own() -> None:
    import os

    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with inductor.fresh_cache():
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] != before
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before

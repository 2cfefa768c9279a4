"""Arguments that cannot be meant, of all that is called by hand: one sentence each, before anything is computed or
sent. On one process as well, where a script is tried first and some of them would change nothing."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import ringopt
from ringopt.errors import OptionError, ProgramError, RingMismatchError
from ringopt.functional import attention, shard, unshard
from ringopt.tensor.from_rows import from_rows
from tests.harness.threads import ThreadMesh, run_on_threads

X = torch.ones(2, 4, 8, 16)
NUMBERS = {
    "window": [(0, "a query sees at least 1 key"), (2.5, "a whole number of keys"), ("a", "a whole number of keys")],
    "sinks": [(4, "beside a window"), (1.5, "how many first keys"), (torch.ones(3), "one logit for each head, [4]")],
    "dropout_p": [(1.5, "a probability is from 0 to 1"), ("x", "a probability is from 0 to 1")],
    "scale": [(wrong, "a number, or None for 1 / sqrt(head dim)") for wrong in ("x", float("nan"))],
    "is_causal": [("no", "attention(is_causal='no'): expected True or False")],
    "dilation_rates": [((1, 2), "both are tuples of whole numbers")],
    "segment_lengths": [((4,), "both are tuples of whole numbers")],
    "dilation_offsets": [("torchscale", "both are tuples of whole numbers")],
    "layout": [
        ("striped", "layout 'striped' is unknown; the layouts are 'contiguous', 'zigzag'"),
        (["zigzag"], "layout ['zigzag'] is unknown"),
        ("replicated", "layout 'replicated' is unknown"),
    ],
    "strategy": [("star", "expected one of 'auto', 'local', 'halo'")],
    "kernel": [("fast", "expected one of 'auto', 'flash', 'cudnn'")],
    "attn_mask": [
        (torch.ones(8, 8, dtype=torch.int64), "of bool (True is seen) or of a floating dtype (added to the scores)"),
        ([[True]], "found list"),
        (torch.zeros(8), "an attn_mask of 2 to 4 dims; found [8]"),
    ],
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("name", "value", "told"), [(name, *wrong) for name, values in NUMBERS.items() for wrong in values]
)
def test_options(name: str, value: Any, told: str, ranks: int) -> None:
    def body(mesh: ThreadMesh) -> None:
        with pytest.raises(OptionError, match=re.escape(told)):
            attention(X, X, X, **{name: value}, **({"mesh": mesh} if ranks > 1 else {}))

    run_on_threads(ranks, body)


@pytest.mark.parametrize(
    ("q", "k", "v", "told"),
    [
        (X[0], X[0], X[0], "attention takes [B, H, S, D] tensors; found query [4, 8, 16]"),
        ([1], X, X, "tensors as query, key, value; found list, Tensor, Tensor"),
        (X.long(), X.long(), X.long(), "tensors of a floating dtype; found torch.int64"),
        (X, X[:, :2], X[:, :2], "4 query heads over 2 KV heads need enable_gqa=True"),
        (X, X, X[:, :, :7], "each key has its value"),
        (X, X[..., :8], X, "query and key have one head dim"),
        (X, X[:1], X[:1], "batch sizes are equal"),
        (X, X.double(), X, "one dtype for all; found torch.float32, torch.float64, torch.float32"),
        (X, X.to("meta"), X, "one device for all; found cpu, meta, cpu"),
        (X[:, :0], X[:, :0], X[:, :0], "attention takes heads, one at least; found query [2, 0, 8, 16]"),
    ],
)
def test_operands_of_one_process(q: Any, k: Any, v: Any, told: str) -> None:
    with pytest.raises(OptionError, match=re.escape(told)):
        attention(q, k, v)


def test_heads_that_cannot_be_shared() -> None:
    with pytest.raises(OptionError, match="4 query heads cannot share 3 KV heads"):
        attention(X, X[:, :3], X[:, :3], enable_gqa=True)


def test_a_mask_of_other_keys() -> None:
    with pytest.raises(OptionError, match=re.escape("an attn_mask of [8, 7] does not fit query [2, 4, 8, 16]")):
        attention(X, X, X, torch.zeros(8, 7))


def test_a_dim_that_is_none() -> None:
    with pytest.raises(OptionError, match=re.escape("shard(dim=4) of a tensor of sizes [2, 4, 8, 16]: it has dims")):
        shard(X, 4)
    for cut in (shard, lambda x, dim, layout: unshard(x, dim, length=8, layout=layout)):
        for layout in ("x", "replicated", ["zigzag"]):
            with pytest.raises(OptionError, match=r"layout .* is unknown"):
                cut(X, 2, layout=layout)
    with pytest.raises(OptionError, match="unshard takes a tensor; found list"):
        unshard([1], 0, length=1)  # type: ignore[arg-type]
    with pytest.raises(RingMismatchError, match=r"dim 2 has 8 rows, and rank 0 of 1 holds 9 rows"):
        unshard(X, 2, length=9)
    for length in ("8", 8.0, -1, None):
        with pytest.raises(OptionError, match=r"unshard\(length=.*expected how many rows the sequence has"):
            unshard(X, 2, length=length)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"query": [1]}, "tensors as query, key, value; found list, Tensor, Tensor"),
        ({"query": X.long()}, "tensors of a floating dtype; found torch.int64"),
        ({"scale": "x"}, "a number, or None for 1 / sqrt(head dim)"),
        ({"dropout_p": 2.0}, "a probability is from 0 to 1"),
    ],
)
def test_arguments_of_a_module(given: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=re.escape(told)):
        ringopt.nn.DilatedAttention((4,), (1,))(**{"query": X, "key": X, "value": X, **given})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (([1], 0), "from_rows takes a tensor; found list"),
        ((X, "1"), "from_rows(dim='1') of a tensor of sizes [2, 4, 8, 16]: it has dims 0 to 3"),
        ((X, 4), "from_rows(dim=4) of a tensor of sizes [2, 4, 8, 16]"),
        ((X.view(2, 4, 8, 16, 1, 1, 1, 1, 1), 1), "from_rows of a tensor of 9 dims; expected one of at most 8"),
    ],
)
def test_rows_that_are_none(given: tuple[Any, Any], told: str) -> None:
    with pytest.raises(OptionError, match=re.escape(told)):
        from_rows(*given)


def test_names_and_meshes_that_are_none_are_told_on_one_process_too() -> None:
    for layout in ("striped", None, ["zigzag"]):
        with pytest.raises(OptionError, match=r"layout .* is unknown; the layouts are 'contiguous', 'zigzag'"):
            from_rows(X, 2, layout=layout)  # type: ignore[arg-type]
    for call in (lambda mesh: from_rows(X, 2, mesh=mesh), lambda mesh: attention(X, X, X, mesh=mesh)):
        with pytest.raises(OptionError, match=r"mesh='cp': expected a torch\.distributed DeviceMesh"):
            call("cp")
    with pytest.raises(OptionError, match=r"hardware \['h100'\] is unknown; the table has cpu, "):
        ringopt.explain(torch.nn.Linear(16, 16), X, hardware=["h100"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("zigzag", "options='zigzag': expected a dict; the options are mesh, shard"),
        ([("layout", "zigzag")], "expected a dict"),
        ({5: 1, "x": 2}, "unknown option 'x', 5; the options are mesh"),
        ({"timeout": float("inf")}, "timeout=inf: expected a number of seconds above 0, at most 1,000,000,000"),
    ],
)
def test_options_that_are_none(options: Any, told: str) -> None:
    with pytest.raises(OptionError, match=re.escape(told)):
        ringopt.explain(torch.nn.Linear(16, 16), X, options=options)


def test_models_that_are_none() -> None:
    for ask, model in itertools.product((ringopt.explain, ringopt.plan), (5, None, "model.pt2", torch.nn.Linear)):
        with pytest.raises(OptionError, match=r"model=.*: expected a module or a function, and behind it the inputs"):
            ask(model, X)
    program = torch.export.export(torch.nn.Linear(16, 16), (X,))
    with pytest.raises(OptionError, match=r"an exported program is planned as the module .* pass program.module\(\)"):
        ringopt.plan(program)
    for load in (ringopt.load, lambda path: ringopt.diff(program, path)):
        with pytest.raises(ProgramError, match="int"):
            load(5)


def test_a_gradient_on_some_ranks_only() -> None:
    """Their backward would wait for the others for good."""

    def body(mesh: ThreadMesh) -> None:
        q: Tensor = X.clone().requires_grad_(mesh.rank == 1)
        with pytest.raises(RingMismatchError, match=r"ranks \[0, 2\] need no gradient and the others do"):
            attention(q, X, X, mesh=mesh)

    run_on_threads(3, body)


@pytest.mark.parametrize("count", [0, -1, 2.5, "8", None, True])
def test_numbers_of_ranks_and_rows(count: Any) -> None:
    with pytest.raises(OptionError, match=r"world_size=.*expected a whole number, 1 or more"):
        ringopt.explain(torch.nn.Linear(16, 16), X, world_size=count)
    with pytest.raises(OptionError, match=r"world_size=.*expected whole numbers, 1 or more"):
        ringopt.plan(torch.nn.Linear(16, 16), X, world_size=count)
    with pytest.raises(OptionError, match=r"lengths=.*expected whole numbers, 1 or more"):
        ringopt.plan(torch.nn.Linear(16, 16), X, lengths=[16, count])


def test_only_programs_are_converted() -> None:
    with pytest.raises(ProgramError, match=r"convert takes what torch.export.export returns; found Linear"):
        ringopt.convert(torch.nn.Linear(16, 16))  # type: ignore[arg-type]

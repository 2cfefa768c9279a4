"""What a user is told of a compilation without asking: by whom, once, and not what is untrue."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import ringopt
from ringopt.drivers.announce import raise_or_warn, summary
from ringopt.errors import RefusedError
from ringopt.options import Options
from ringopt.output.printable import forget, logger, rank_here, spoken
from ringopt.report import Report, Site


class Block(nn.Module):
    """`breaks`: Python between its attention and its MLP, and whether both are there."""

    def __init__(self, attends: bool = True, breaks: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2, self.attends, self.breaks = nn.Linear(8, 32), nn.Linear(32, 8), attends, breaks

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.attends else torch.ops.announced.attend(x[:, None])[:, 0]
        x = self.fc2(F.relu(self.fc1(x)))
        if self.breaks:
            torch._dynamo.graph_break()
        if self.attends:
            q = x.unflatten(-1, (2, 4)).transpose(1, 2)
            x = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        return x


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(spoken(record, rank_here()))


def heard_by_rank() -> list[tuple[list[str], str]]:
    """Of each model: what this rank says, and the error."""
    found = []
    for attends, breaks, refuses in ((True, False, "error"), (True, True, "error"), (False, True, "error"),
                                     (False, False, "error"), (False, False, "warn")):  # fmt: skip
        torch._dynamo.reset()
        forget()
        heard, error = Heard(), ""
        logging.getLogger("ringopt").addHandler(heard)
        model = Block(attends, breaks)
        step = torch.compile(model, backend="ring", options={"inner_backend": "eager", "on_refusal": refuses})  # type: ignore[call-overload]
        try:
            for n in (8, 8, 10):  # the last is compiled again
                step(torch.ones(1, n, 8))
        except Exception as problem:
            error = str(problem)
        logging.getLogger("ringopt").removeHandler(heard)
        found.append((heard.said, error))
    return found


def test_one_rank_tells_once_of_all_graphs_of_a_program(ranks: Any) -> None:
    first, second = ranks(2, heard_by_rank)
    (whole, _), (parts, wrong), *without, (warned, _) = first
    assert whole == ["ringopt: 1 of 1 attention, 100% of matrix work on shards, 2 ranks"]
    assert parts == ["ringopt: 1 of 1 attention, 100% of matrix work on shards, 2 ranks, 2 graphs"] and not wrong
    nothing = "not sharded: no attention and no recurrence was found, so every rank does all of the matrix work"
    for said, error in without:
        assert not said and nothing in error and "most of it in fc1 (test_announce.py:" in error
    assert len(warned) == 1 and warned[0].startswith(f"ringopt [rank 0] warning: {nothing}")
    assert [said for said, _ in second] == [[]] * 5  # one rank speaks, and all have the error
    assert [bool(error) for _, error in second] == [False, False, True, True, False]


def test_one_process_is_told_that_nothing_is_sharded_and_that_it_agrees() -> None:
    forget()
    heard = Heard()
    logging.getLogger("ringopt").addHandler(heard)
    for verify in (False, True):
        torch._dynamo.reset()
        chosen = {"inner_backend": "eager", "verify": verify}
        torch.compile(Block(), backend="ring", options=chosen)(torch.ones(1, 8, 8))  # type: ignore[call-overload]
    logging.getLogger("ringopt").removeHandler(heard)
    alone, agreed = heard.said
    assert alone.startswith("ringopt: one process, so nothing is sharded: start the script with torchrun")
    assert agreed.startswith("ringopt: verify: ") and "values agree with the program as written" in agreed


def test_what_is_said_is_in_proportion() -> None:
    whole = ringopt.explain(Block(), torch.ones(1, 8, 8), world_size=2)
    site, scan = whole.sites[0], replace(whole.sites[0], form="scan", refusal="its step is not affine")
    assert summary(whole) == "1 of 1 attention, 100% of matrix work on shards, 2 ranks"
    half = replace(whole, sites=(site, scan), sharded_fraction=0.4449, heaviest="fc1")
    line = "1 of 1 attention, 0 of 1 scan, 44.5% of matrix work on shards, 2 ranks, 3 graphs"
    assert summary(half, 3) == f"{line}; most of what is not, in fc1"


def test_what_is_computed_on_shards_is_not_said_to_be_replicated(caplog: pytest.LogCaptureFixture) -> None:
    report = Report(2, left_alone=("softmax: it hides by value",), sharded_fraction=1.0, matrix_flops=1)
    raise_or_warn(report, Options(on_refusal="error"))
    raise_or_warn(report, Options())
    assert not caplog.messages
    assert "whole    nothing" in str(report) and "softmax: it hides" in str(replace(report, sharded_fraction=0.0))
    with pytest.raises(RefusedError, match=r"not sharded: softmax: it hides by value\. With on_refusal"):
        raise_or_warn(replace(report, sharded_fraction=0.0), Options(on_refusal="error"))


class TopK(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scores = x @ x.transpose(1, 2)
        return scores.masked_fill(scores < scores.topk(4, -1).values[..., -1:], float("-inf")).softmax(-1) @ x


def test_refused_attention_whose_rows_are_spread_is_no_replicated_one() -> None:
    report = ringopt.explain(TopK(), torch.ones(1, 16, 8), world_size=2)
    (site,) = report.sites
    assert site.refusal and site.by_rows and report.sharded_fraction == 1.0
    raise_or_warn(report, Options(on_refusal="error"))
    assert "sharded  by rows of queries, with keys and values whole, for the mask is made of" in str(report)
    with pytest.raises(RefusedError, match="not sharded: attention: the mask is made of the scores themselves"):
        raise_or_warn(replace(report, sites=(replace(site, by_rows=False),)), Options(on_refusal="error"))


def test_graphs_are_weighed_by_their_work() -> None:
    site = Site("a", "sdpa", "causal", "ring", "math", "zigzag", None, 0)
    parts = [Report(2, (site,), sharded_fraction=1.0, matrix_flops=30), Report(2, matrix_flops=10, heaviest="mlp")]
    merged = Report.merged(parts, 2)
    assert (merged.sharded_fraction, merged.matrix_flops, merged.heaviest) == (0.75, 40, "mlp")
    line = "1 of 1 attention, 75% of matrix work on shards, 2 ranks"
    assert summary(merged) == f"{line}; most of what is not, in mlp"


def test_the_voice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    log = logger("ringopt.here")
    log.warning("heard by pytest, which has set up logging")
    assert "ringopt" not in capsys.readouterr().err
    monkeypatch.setattr(logging.getLogger("ringopt"), "propagate", False)
    monkeypatch.setenv("RANK", "3")
    log.warning("two\x1b")
    logging.getLogger("ringopt").setLevel("ERROR")
    log.warning("silenced")
    logger("ringopt.summary").info("silenced")
    logging.getLogger("ringopt").setLevel(logging.NOTSET)
    logger("ringopt.summary").info("one")
    assert capsys.readouterr().err == "ringopt [rank 3] warning: two\\x1b\nringopt: one\n"


@torch.library.custom_op("announced::attend", mutates_args=())
def attend(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q)


@attend.register_fake
def _(q: Tensor) -> Tensor:
    return torch.empty_like(q)


class Hidden(nn.Module):
    """Attention behind an operator of another library, in a module whose name is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.announced.attend(self.layers(x)[:, None])  # type: ignore[no-any-return]


def test_where_nothing_is_found_operators_that_hide_it_are_named() -> None:
    report = ringopt.explain(Hidden(), torch.ones(1, 8, 8), world_size=2)
    [name] = report.unknown
    assert name.startswith("announced::attend (test_announce.py:")
    assert f"no rule describes (ringopt.rule): {name}" in report.shards_nothing
    assert Report.from_dict(report.to_dict()) == report
    plain = ringopt.explain(nn.Sequential(nn.Linear(8, 8)), torch.ones(1, 8), world_size=2)  # of one row
    assert "most of it in module 0" in plain.shards_nothing and not plain.unknown


def test_what_comes_in_is_parameters_buffers_and_inputs() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)
            self.register_buffer("mask", torch.ones(16, 16).tril() == 1)

        def forward(self, x: Tensor) -> Tensor:
            q = self.linear(x)
            return F.scaled_dot_product_attention(q, q, q, attn_mask=self.mask[: x.shape[1], : x.shape[1]])

    held = ringopt.explain(Masked(), torch.ones(1, 12, 8), world_size=2).memory
    assert (held["parameters"], held["buffers"], held["inputs"]) == (8 * 8 * 4, 16 * 16, 12 * 8 * 4)

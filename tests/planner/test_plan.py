"""`ringopt.plan` and `ringopt plan`: predictions that plans, real runs and data sheets bear out."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ringopt
from ringopt.cost.message_bytes import bytes_between, bytes_sent
from ringopt.cost.simulate import pairs_of
from ringopt.distributed.traffic import record_traffic
from ringopt.errors import OptionError
from ringopt.planner.plan import Plan
from ringopt.planner.site_cost import at_length
from ringopt.planner.trace_model import TRACED
from ringopt.tools.cli import main
from ringopt.tools.common.command import WIDTH
from ringopt.tools.plan_pictures import drawn_attention
from tests.harness.pages import data_of

ROWS = 64


class Model(nn.Module):
    """With a shift along the sequence, of which rows go from rank to rank."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        out = self.out(mixed)
        return (out[:, :-1] - x[:, 1:]).square().mean() + out.roll(1, 1).mean()


def model(rows: int = ROWS) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return Model(), (torch.randn(1, rows, 16),)


@pytest.fixture(scope="module")
def found() -> Plan:
    module, inputs = model()
    return ringopt.plan(module, *inputs, world_size=[2, 4, 1024], lengths=[ROWS, 2**24], hardware="a100")


def test_points_are_by_length_and_ranks(found: Plan) -> None:
    assert [(p.length, p.world_size) for p in found.points] == [
        (ROWS, 2), (ROWS, 4), (2**24, 2), (2**24, 4), (2**24, 1024),
    ]  # fmt: skip
    assert found.training and found.link == "nvlink3"
    assert all(point.layout == "zigzag" for point in found.points if point.length == 2**24)


def test_of_an_input_whose_length_is_marked_as_open_too(found: Plan) -> None:
    module, (x,) = model()
    torch._dynamo.mark_dynamic(x, 1)
    points = ringopt.plan(module, x, world_size=2, lengths=[ROWS], hardware="a100").points
    assert points == found.points[:1]


@pytest.mark.zoo
def test_what_is_turned_to_columns_and_back_falls_with_ranks() -> None:
    class Sorted(Model):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            return self.out(mixed.sort(1).values).square().mean()

    _, inputs = model()
    for point in ringopt.plan(Sorted(), *inputs, world_size=[2, 3, 1024], lengths=[2**20]).points:
        ranks, whole = point.world_size, 2**20 * 16 * 4
        beside = point.bytes - sum(site.bytes for site in point.sites)
        assert beside == pytest.approx(4 * whole * (ranks - 1) / ranks**2, rel=0.05)


def test_time_and_memory_fall_with_ranks(found: Plan) -> None:
    long = {point.world_size: point for point in found.points if point.length == 2**24}
    assert long[2].seconds / long[1024].seconds == pytest.approx(512, rel=0.1)
    assert long[2].memory > long[4].memory > 100 * long[1024].memory
    assert long[1024].fits


def sent_on_a_rank(strategy: str, rows: int) -> list[int]:
    """Bytes of a training step in all, and of the attention forward and backward."""
    import torch.distributed as dist

    torch._dynamo.reset()
    module, inputs = model(rows)
    options = {"strategy": strategy, "layout": "zigzag", "inner_backend": "aot_eager", "check_inputs": "never"}
    compiled = torch.compile(module, backend="ring", options=options)
    compiled(*inputs).backward()
    dist.barrier()
    with record_traffic() as traffic:
        compiled(*inputs).backward()
    ways = ("forward", "backward")
    exchanged = [event.bytes for event in traffic.events if event.kind == "posted" and event.label.startswith(ways)]
    return [traffic.bytes_sent, sum(exchanged)]


@pytest.mark.parametrize(
    ("p", "rows"), [(3, 61), *(pytest.param(*each, marks=pytest.mark.zoo) for each in ((2, 61), (4, ROWS)))]
)
def test_bytes_and_pairs_are_those_of_a_real_run(ranks: Any, p: int, rows: int) -> None:
    """The chunks of 61 rows are of two sizes. Beside attention, bytes are those of the ranks traced."""
    strategy = "ring"
    module, inputs = model(rows)
    options = {"strategy": strategy, "layout": "zigzag"}
    planned = ringopt.plan(module, *inputs, world_size=p, lengths=[rows], options=options)
    (point,) = planned.points
    ran = ranks(p, sent_on_a_rank, strategy, rows)
    assert point.sites[0].bytes == max(exchanged for _, exchanged in ran)
    total = max(total for total, _ in ran)
    assert point.bytes == total if p in TRACED else total <= point.bytes <= 1.01 * total
    case = at_length(planned.traced.sites[0].case, rows, rows, p)
    exchange = case.plan(p, "zigzag", strategy)
    assert point.sites[0].pairs == max(pairs_of(exchange, rank) for rank in range(p))
    both = [sum(bytes_sent(exchange, case.heads, rank, way) for way in (False, True)) for rank in range(p)]
    assert point.sites[0].bytes == max(both)


@pytest.mark.zoo
def test_several_nodes() -> None:
    """Of 8 ranks. With the hybrid less leaves a node than with a ring; on 16 ranks as the plan has it, on 64 by
    formula."""
    torch.manual_seed(0)
    asked: dict[str, Any] = {"world_size": [16, 64], "lengths": [2**16], "hardware": "a100"}
    found, ring = (
        ringopt.plan(Model(8), torch.randn(1, ROWS, 16), **asked, options={"strategy": strategy, "layout": "zigzag"})
        for strategy in ("hybrid", "ring")
    )
    assert (found.node, found.network) == (8, "infiniband-hdr") and "infiniband-hdr between nodes of 8" in str(found)
    for point, round_all in zip(found.points, ring.points, strict=True):
        (site,), (other,) = point.sites, round_all.sites
        case = at_length(found.traced.sites[0].case, 2**16, ROWS, point.world_size)
        exchange = case.plan(point.world_size, "zigzag", "hybrid(8)")
        for told, count in ((site.bytes, bytes_sent), (site.between, lambda *of: bytes_between(*of[:3], 8, of[3]))):
            ways = [[count(exchange, case.heads, rank, way) for rank in range(exchange.ranks)] for way in (False, True)]
            # A formula is of the rank that sends most in the forward, and of the one that does in the backward.
            assert told == (max(map(sum, zip(*ways, strict=True))) if exchange.ranks == 16 else sum(map(max, ways)))
        assert site.strategy == "hybrid(8)"
        assert other.bytes / 2 < other.between <= other.bytes and site.between < other.between / 7
        assert site.seconds < other.seconds
        assert point.between - site.between == point.bytes - site.bytes  # what else is sent goes round
    assert drawn_attention(found).ranks == 8  # type: ignore[union-attr]


def test_a_hybrid_takes_several_nodes() -> None:
    for asked in ({"world_size": 8}, {"world_size": 16, "link": "nvlink3"}):
        with pytest.raises(
            OptionError, match=r"'hybrid' takes several nodes, and \d+ ranks are joined by nvlink3 alone"
        ):
            ringopt.plan(
                *(Model(8), torch.randn(1, ROWS, 16)), **asked, hardware="a100", options={"strategy": "hybrid"}
            )


@pytest.mark.zoo
def test_a_forward_alone_is_planned_without_gradients() -> None:
    module, inputs = model()
    with torch.no_grad():
        forward = ringopt.plan(module, *inputs, world_size=4, lengths=[1024])
    training = ringopt.plan(module, *inputs, world_size=4, lengths=[1024])
    assert not forward.training and training.training
    assert training.points[0].flops == pytest.approx(3.3 * forward.points[0].flops, rel=0.15)


def test_a_notebook_shows_the_table(found: Plan) -> None:
    page = found._repr_html_()
    assert page.startswith("<pre>") and "tokens" in page and str(found).splitlines()[-1] in page


def test_the_formulas_that_were_used_are_shown(found: Plan) -> None:
    formulas = found.formulas()
    assert "causal zigzag ring" in formulas and "flops = " in str(formulas["causal zigzag ring"])


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"world_size": 0}, "expected whole numbers, 1 or more"),
        ({"hardware": "h101"}, "hardware 'h101' is unknown; the table has cpu, p100"),
        ({"link": "string"}, "link 'string' is unknown"),
        ({"options": {"strategy": "halo"}}, "strategy 'halo' cannot do causal"),
        ({"lengths": [100], "world_size": 64}, "every one is shorter than 2 rows for each of 64 ranks"),
    ],
)
def test_what_cannot_be_planned_is_an_error(asked: dict[str, Any], told: str) -> None:
    module, inputs = model()
    with pytest.raises(OptionError, match=told):
        ringopt.plan(module, *inputs, **asked)


def test_without_attention_there_is_nothing_to_plan() -> None:
    with pytest.raises(OptionError, match="there is nothing to plan"):
        ringopt.plan(nn.Linear(4, 4), torch.randn(2, 4))


@pytest.mark.zoo
def test_a_million_ranks() -> None:
    """As many rows each as on a thousand: a thousand times the pairs and the bytes, and as much memory."""
    module, inputs = model()
    asked: dict[str, Any] = {"hardware": "a100", "options": {"layout": "zigzag"}}
    many = ringopt.plan(module, *inputs, world_size=10**6, lengths=[2**30], **asked).points[0]
    few = ringopt.plan(module, *inputs, world_size=10**3, lengths=[2**30 // 10**3], **asked).points[0]
    assert many.strategies == few.strategies
    assert many.sites[0].pairs == pytest.approx(1000 * few.sites[0].pairs, rel=0.01)
    assert many.sites[0].bytes == pytest.approx(1000 * few.sites[0].bytes, rel=0.01)
    assert many.sites[0].memory == pytest.approx(few.sites[0].memory, rel=0.01)


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.attention(x, y, y, need_weights=False)[0]
        return out


@pytest.mark.zoo
@pytest.mark.parametrize(("queries", "keys"), [(64, 3), (3, 64)])
def test_a_side_that_every_rank_has_whole_is_as_long_on_many_ranks(queries: int, keys: int) -> None:
    """Of 64 rows for each rank on 32 and on 64; of queries all have the parts of all to merge."""
    x, y = torch.randn(1, queries, 16), torch.randn(1, keys, 16)
    few, many = (ringopt.plan(Cross(), x, y, world_size=p, lengths=[64 * p]).points[0].sites[0] for p in (32, 64))
    assert few.pairs == many.pairs == 64 * 3
    parts = 2 * 32 * 3 * 2 * (8 + 1) * 4 if queries < keys else 0  # and a buffer: 32 ranks, 3 queries, 2 heads
    assert many.memory == few.memory + parts


class Packed(nn.Module):
    """Three documents that the model knows."""

    def __init__(self) -> None:
        super().__init__()
        number = torch.tensor([0] * 20 + [1] * 30 + [2] * 14)
        self.register_buffer("mask", number[:, None] == number)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=self.mask)


def test_a_mask_of_one_length_is_planned_at_that() -> None:
    x = torch.randn(1, 2, ROWS, 8)
    found = ringopt.plan(Packed(), x, world_size=4, lengths=[ROWS])
    assert found.points[0].sites[0].pairs and found.longest == {4: ROWS}
    with pytest.raises(OptionError, match=r"told by numbers of rows \(blocks\(10x10;.* Pass lengths=\[64\], or"):
        ringopt.plan(Packed(), x, world_size=4, lengths=[ROWS, 2 * ROWS])


class Retained(nn.Module):
    """Retention, which is no attention site, and attention where it is asked for."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.attends, self.qkv = attends, nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        i = torch.arange(x.shape[1])
        y = (q @ k.mT * torch.where(i[:, None] >= i, 0.9 ** (i[:, None] - i), 0.0)) @ v
        y = F.scaled_dot_product_attention(y, k, v) if self.attends else y
        return y.transpose(1, 2).flatten(2)


@pytest.mark.sample(4)
@pytest.mark.parametrize("attends", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_pairs_that_are_no_site_grow_with_the_square(attends: bool, training: bool) -> None:
    """Told of a trace at 64 rows, for 512, as of a trace at 512."""
    asked = {"world_size": [2, 4, 8], "lengths": [512]}
    with torch.set_grad_enabled(training):
        plans = (ringopt.plan(Retained(attends), torch.randn(1, n, 16), **asked) for n in (64, 512))
        few, many = plans
    assert re.match(r"pairs of matmul \[1, 2, 64, 64\] .* are no site: each rank computes", few.notes[0])
    for told, found in zip(few.points, many.points, strict=True):
        weights = 2 * 512 * 512 // found.world_size  # of 2 heads; each is made in 8 products, and weighs 8
        assert found.memory > 4 * weights and found.flops > 2 * 2 * 8 * weights
        assert told.memory == pytest.approx(found.memory, rel=0.1)
        assert told.flops == pytest.approx(found.flops, rel=0.01)
        assert told.bytes == pytest.approx(found.bytes, rel=0.01)
        assert (told.strategies, told.layout) == (found.strategies, found.layout)


class Positions(nn.Module):
    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.tokens, self.wpe, self.model = nn.Embedding(50, 16), nn.Embedding(512, 16), Model()
        self.register_buffer("ids", torch.arange(512)[None] if kept else None)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(x.shape[1]) if self.ids is None else self.ids[:, : x.shape[1]]
        return self.model(self.tokens(x) + self.wpe(ids))  # type: ignore[no-any-return]


@pytest.mark.zoo
@pytest.mark.parametrize("kept", [False, True])
def test_positions_that_a_model_does_not_have_are_named(kept: bool) -> None:
    x = torch.zeros(1, 64, dtype=torch.long)
    notes = [ringopt.plan(Positions(kept), x, world_size=8, lengths=[n]).notes for n in (512, 1024)]
    named = [[note for note in each if "positions" in note] for each in notes]
    assert not named[0] and len(named[1]) == 1 and named[1][0].startswith("wpe has 512 positions, so the model takes")


def test_the_longest_length_that_fits_agrees_with_the_table() -> None:
    module, x = Model(), torch.randn(16, ROWS, 16)
    plan = ringopt.plan(module, x, world_size=2, lengths=[ROWS], hardware="p100")
    (longest,) = plan.longest.values()
    assert longest is not None and longest < 2**24
    beyond = longest + longest // 16
    table = ringopt.plan(module, x, world_size=2, lengths=[longest, beyond], hardware="p100")
    assert [point.fits for point in table.points] == [True, False] and table.longest == plan.longest
    assert f"2 ranks: up to {longest:,} tokens fit, then the 16.0 GiB of p100 are full" in str(plan)
    assert repr(plan).startswith("<ringopt.Plan: 1 point on p100 over ")


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "planned_models.py").write_text("from tests.planner.test_plan import model as tiny\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("planned_models", None)
    return tmp_path


def test_the_command_prints_a_table_that_fits(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "planned_models:tiny", "--world-size", "8", "--lengths", "16777216"]
    assert main([*asked, "--formulas"]) == 0
    table, _, formulas = capsys.readouterr().out.partition("\n\n")
    assert max(map(len, table.splitlines())) <= WIDTH and "16,777,216" in table
    assert "up to 16,777,216 tokens fit, the longest that is looked at" in table and "seconds = " in formulas
    assert "Hq and Hkv heads" in formulas


def test_the_command_as_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "planned_models:tiny", "--world-size", "2", "--lengths", "4096", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["hardware"] == "h100" and data["points"][0]["sites"][0]["exact"]


def test_a_picture_that_cannot_be_written_is_refused_before_any_work(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plan.xyz", "plan"):
        assert main(["plan", "no_such_module:tiny", "--plot", name]) == 2
        assert f"--plot {name}: the name of a picture ends in one of ." in capsys.readouterr().err


@pytest.mark.zoo
def test_pictures_and_the_page(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "planned_models:tiny", "--world-size", "2", "8", "--lengths", "4096", "65536"]
    assert main([*asked, "--plot", "plan.png", "--html", "plan.html"]) == 0
    assert (here / "plan.png").stat().st_size > 10_000
    data = data_of((here / "plan.html").read_text())
    assert len(data["points"]) == 4 and data["attention"]["spans"] and data["limit"] > 2**30


@pytest.mark.zoo
def test_a_page_of_a_program_in_a_file(here: Path) -> None:
    module, inputs = model()
    torch.export.save(torch.export.export(module, inputs), here / "model.pt2")
    asked = ["--world-size", "2", "--lengths", "4096", "--html"]
    pages = []
    for target in ("model.pt2", "planned_models:tiny"):
        assert main(["plan", target, *asked, "plan.html"]) == 0
        pages.append((here / "plan.html").read_text().replace(target, "TARGET"))
    assert pages[0] == pages[1] and data_of(pages[0])["legend"]

"""The backend as a user meets it: options, refusals, other lengths, warm caches, ranks that disagree."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh

import ringopt
from ringopt.backend import ring
from ringopt.distributed.lookup import mesh_of
from ringopt.distributed.mesh import PretendedMesh
from ringopt.drivers.announce import raise_or_warn
from ringopt.drivers.compile import transform
from ringopt.errors import OptionError
from ringopt.ir.nodes import op_name, value_of
from ringopt.options import Options
from ringopt.torch_compat import inductor
from tests.harness.errors import worst_of
from tests.harness.models import build, difference, run
from tests.harness.translation import captured, validate


class Attention(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x):
        b, n, width = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, n, width))


def data(n=12, width=16, seed=1):
    return torch.randn(2, n, width, generator=torch.Generator().manual_seed(seed))


# ---- options -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"sharding": 1}, "unknown option 'sharding'; the options are mesh, shard, strategy, layout"),
        ({"strategy": "fastest"}, "option strategy='fastest': expected one of 'auto', 'local', 'halo'"),
        ({"timeout": 0}, "option timeout=0: expected a number of seconds above 0"),
        ({"timeout": float("inf")}, "option timeout=inf: expected a number of seconds above 0"),
        ({"mesh": 4}, "option mesh=4: expected a torch.distributed DeviceMesh"),
    ],
)
def test_an_option_that_cannot_be_used(options, sentence):
    with pytest.raises(OptionError, match=sentence):
        Options.of(options)
    with pytest.raises(Exception, match=sentence):
        torch.compile(Attention(), backend="ring", options=options)(data())


def test_a_launched_process_without_a_group_is_told(monkeypatch, caplog):
    monkeypatch.setenv("WORLD_SIZE", "2")
    torch._dynamo.reset()
    torch.compile(Attention(), backend="ring", options={"inner_backend": "eager"})(data())
    assert "launched as one of 2 (WORLD_SIZE): torch.distributed is not initialized" in caplog.text


@pytest.mark.parametrize("options, n", [({"strategy": "ring"}, 3), ({"layout": "zigzag"}, 7)])
def test_a_forced_choice_needs_enough_rows(options, n):
    with pytest.raises(Exception, match=f"{n} rows"):
        ringopt.explain(Attention(), data(n), world_size=4, options=options)


def mesh_options(options_of_mesh):
    """On 4 ranks as 2 x 2: the error of this rank, or its result's distance from one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    chosen = {"two dims": mesh, "cp": mesh["cp"]}[options_of_mesh]
    model, x = Attention(), data(seed=dist.get_rank() // 2)  # each pair of ranks has its own batch
    try:
        found = torch.compile(model, backend="ring", options={"mesh": chosen, "inner_backend": "aot_eager"})(x)
    except Exception as error:
        return str(error)
    return float((found - model(x)).abs().max().detach())


def test_a_mesh_of_part_of_the_ranks(ranks):
    assert max(ranks(4, mesh_options, "cp")) < 1e-6
    assert all("option mesh has 2 dims" in error for error in ranks(4, mesh_options, "two dims"))


def other_ranks_mesh():
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("cp",))
    try:
        Options(mesh=mesh)
    except OptionError as error:
        return str(error)
    return "fine"


def test_a_mesh_without_this_rank(ranks):
    said = ranks(3, other_ranks_mesh)
    assert said[:2] == ["fine", "fine"] and "this rank is not among them" in said[2]


def test_graphs_that_draw_are_compiled_with_settings_for_hashes(monkeypatch):
    settings = []
    monkeypatch.setattr(inductor, "compile_fx", lambda gm, inputs, patches: settings.append(patches) or gm)
    for model in (nn.Dropout(0.5), nn.Linear(4, 4)):
        torch.compile(model, backend="ring")(torch.ones(3, 4))
    assert settings == [inductor.hash_settings(), {}]


# ---- compiling again -----------------------------------------------------------------------------------------------
def changed_option_and_lengths():
    torch._dynamo.reset()
    model, before = Attention(), len(ringopt.reports())
    layouts = []
    for layout in ("contiguous", "zigzag"):
        compiled = torch.compile(model, backend="ring", options={"layout": layout, "inner_backend": "eager"})
        for n in (12, 17, 12, 21):
            found, expected = run(compiled, model, {"x": data(n)}), run(model, model, {"x": data(n)})
            assert difference(found, expected) < 1e-5
        layouts.append({report.sites[0].layout for report in ringopt.reports()[before:]})
        before = len(ringopt.reports())
    return layouts


@pytest.mark.zoo
def test_changed_options_and_lengths_compile_again(ranks):
    assert ranks(2, changed_option_and_lengths) == [[{"contiguous"}, {"zigzag"}]] * 2


def called_under(mode):
    """The error of a call under `mode`, against the same call in one process; and whether it was sharded."""
    torch._dynamo.reset()
    model, x = Attention(), data(13)
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"}, dynamic=mode == "dynamic")
    around = {
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "dynamic": nullcontext,
    }[mode]
    with around():
        found, expected = compiled(x), model(x)
    error = float((found.double() - expected.double()).abs().max())
    if found.requires_grad:
        found.float().sum().backward()
        gradient = model.qkv.weight.grad.clone()
        model.zero_grad()
        with around():
            expected = model(x)
        expected.float().sum().backward()
        error = worst_of(error, difference([gradient], [model.qkv.weight.grad]))
    return error, found.dtype == expected.dtype, ringopt.reports()[-1].sharded_fraction


@pytest.mark.sample(4)
@pytest.mark.parametrize("mode, bound", [("autocast", 0.03), ("no_grad", 1e-6), ("inference", 1e-6), ("dynamic", 1e-5)])
def test_the_modes_a_model_is_called_in(ranks, mode, bound):
    for error, same_dtype, sharded in ranks(2, called_under, mode):
        assert error < bound and same_dtype and sharded == 1.0


def warm_cache(folder):
    from torch._dynamo.utils import counters

    model, x = Attention(), data(13)  # shards of 6 and 7 rows: the ranks must not find each other's code
    seen = []
    # In an empty folder programs would be compiled that ask for vector units.
    plain = inductor_config.patch({"cpp.simdlen": 1})
    with patch.dict("os.environ", {"TORCHINDUCTOR_CACHE_DIR": folder}), plain:
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            found = run(torch.compile(model, backend="ring"), model, {"x": x})
            seen.append(
                (difference(found, run(model, model, {"x": x})), ringopt.reports()[-1], dict(counters["aot_autograd"]))
            )
    (cold, report, _), (warm, again, hits) = seen
    return cold, warm, report == again, hits.get("autograd_cache_hit", 0)


@pytest.mark.zoo
def test_a_warm_cache_gives_the_same_numbers_and_report(ranks):
    with tempfile.TemporaryDirectory() as folder:
        for cold, warm, same_report, hits in ranks(2, warm_cache, folder, timeout=240):
            assert cold < 1e-5 and warm < 1e-5 and same_report and hits == 1


# ---- ranks that disagree -------------------------------------------------------------------------------------------
def other_inputs(what):
    torch._dynamo.reset()
    rank = dist.get_rank()
    model, x = Attention(), data(seed=rank if what == "batch" else 1)
    if what == "parameters" and rank == 1:
        with torch.no_grad():
            model.out.bias += 1
    if what == "shape":
        x = data(12 + rank)
    if what == "layers":
        model = nn.Sequential(*(Attention() for _ in range(2 + rank)))
    try:
        torch.compile(model, backend="ring", options={"inner_backend": "aot_eager", "timeout": 20})(x)
    except ringopt.errors.RingMismatchError as error:
        return str(error)
    return "ran"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "what, sentence",
    [
        ("batch", "every rank passes the same full batch"),
        ("parameters", "out_bias on ranks [1]"),
        ("shape", "rank 0 has %x = input L['x'] torch.float32 [2, 12, 16]"),
        ("shape", "rank 1 has %x = input L['x'] torch.float32 [2, 13, 16]"),
        ("layers", "The first node that differs: rank 0 has return [%"),
    ],
)
def test_ranks_with_other_inputs_are_told(ranks, what, sentence):
    for said in ranks(2, other_inputs, what):
        assert sentence in said


# ---- refusals ------------------------------------------------------------------------------------------------------
def test_on_refusal_error_says_the_sites():
    class OneValue(Attention):
        def forward(self, x):
            x = x.unflatten(-1, (2, -1)).transpose(1, 2)
            return F.scaled_dot_product_attention(x, x, x[:, :1], enable_gqa=True)

    gm, inputs = captured(OneValue(), data())
    report = transform(gm, inputs, Options(), mesh_of("pretend:0/2")).report
    with pytest.raises(ringopt.errors.RefusedError, match="have different numbers of heads"):
        raise_or_warn(report, Options(on_refusal="error"))


# ---- what is sharded -----------------------------------------------------------------------------------------------
def test_no_value_of_llama_holds_all_tokens():
    """Between the embedding and the loss; and nothing is [n, n]."""
    n = 67
    model, inputs = build("llama", n, torch.float64)
    verdict = validate(2, model, inputs)
    assert not verdict.wrong
    whole, outputs = [], set(verdict.graph.graph.output_node().all_input_nodes)
    for node in verdict.graph.graph.nodes:
        value = value_of(node)
        if node.op == "call_function" and isinstance(value, torch.Tensor) and value.dim() and n in value.shape:
            assert list(value.shape).count(n) == 1
            if value.is_floating_point() and node not in outputs:
                whole.append((op_name(node), list(value.shape)))
    assert whole == []
    assert [gather.op for gather in verdict.report.gathers] == ["output"]
    assert verdict.report.sharded_fraction == 1.0


# ---- explain, and one process --------------------------------------------------------------------------------------
def test_explain_needs_no_process_and_any_world_size():
    model, inputs = build("llama", 64)
    report = ringopt.explain(model, world_size=16, **inputs)
    assert [(s.module, s.form, s.pattern, s.strategy, s.refusal) for s in report.sites] == [
        (f"model.layers.{i}.self_attn", "sdpa", "causal", "ring", None) for i in range(2)
    ]
    assert report.world_size == 16 and report.sharded_fraction == 1.0 and report.bytes_sent > 0
    assert "causal" in str(report) and report.to_dict()["sites"][0]["layout"] == "zigzag"


@pytest.mark.zoo
def test_explain_runs_nothing_at_full_size():
    with torch.device("meta"):
        model, inputs = build("llama", 64)
        inputs = {key: x.to("meta") for key, x in inputs.items()}
    assert ringopt.explain(model, world_size=8, **inputs).sharded_fraction == 1.0


def test_explain_tells_where_python_cannot_go_on_with_zeros():
    class Counts(Attention):
        def forward(self, x):
            y = super().forward(x)
            return y.unflatten(-1, (int((y > 99).sum().item()) + int((y.abs() > 0).any().item()), -1))

    report = ringopt.explain(Counts(), data(16), world_size=2)
    assert len(report.sites) == 1 and "the program between the graphs was given zeros" in report.notes[-1]


def test_the_report_says_where_messages_do_not_go_the_shortest_way():
    class Far(PretendedMesh):
        remark = "messages go through gloo"

    for mesh, told in ((Far(0, 2), True), (PretendedMesh(0, 2), False)):
        report = transform(*captured(Attention(), data()), Options(), mesh).report
        assert (Far.remark in report.notes) == told


def test_one_process_keeps_dynamic_sizes():
    """One compilation for all lengths from the second on, as with any backend."""
    torch._dynamo.reset()
    model, before = Attention(), len(ringopt.reports())
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    for n in (12, 17, 21, 30):
        assert difference(run(compiled, model, {"x": data(n)}), run(model, model, {"x": data(n)})) < 1e-5
    assert len(ringopt.reports()) - before == 2


class Spelled(nn.Module):
    """Attention written out, whose scores go through `hide`."""

    def __init__(self, hide):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.hide = nn.Linear(16, 48).double(), hide
        self.register_buffer("triangle", torch.ones(64, 64).tril())

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return (self.hide(self, q @ k.mT * 0.5, x.shape[1]).softmax(-1) @ v).transpose(1, 2).flatten(2)


def hidden_later(m, scores, n):
    return scores + torch.full((n, n), -torch.inf, dtype=scores.dtype).triu(1)


def hidden_by_buffer(m, scores, n):
    return scores.masked_fill(m.triangle[:n, :n] == 0, -torch.inf)


def hidden_far(m, scores, n):
    return scores.masked_fill((torch.arange(n)[:, None] - torch.arange(n)).abs() > 5, -torch.inf)


@pytest.mark.sample(4)
@pytest.mark.parametrize("hide", [lambda m, scores, n: scores, hidden_later, hidden_by_buffer, hidden_far])
def test_one_process_fuses_attention_at_every_length(hide):
    """From the second length on one graph serves all, with SDPA."""
    compiled_ops, graphs = [], []

    def of_aot(gm, _inputs):
        compiled_ops.append([str(node.target) for node in gm.graph.nodes if node.op == "call_function"])
        return gm

    def backend(gm, inputs):
        graphs.append(transform(gm, inputs, Options(), mesh_of("pretend:0/1")))
        return aot_autograd(fw_compiler=of_aot, bw_compiler=lambda gm, _: gm)(graphs[-1].graph or gm, inputs)

    torch._dynamo.reset()
    model = Spelled(hide)
    compiled = torch.compile(model, backend=backend)
    for n in (12, 17, 21, 40):
        x = torch.randn(2, n, 16, dtype=torch.float64)
        assert difference(run(compiled, model, {"x": x}), run(model, model, {"x": x})) < 1e-10
    assert len(graphs) == 2
    fused = [any("scaled_dot_product" in op for op in ops) for ops in compiled_ops]
    assert fused == [True, True]


def test_a_factor_of_each_query_at_an_open_length():
    model = Spelled(lambda m, scores, n: scores * torch.arange(1, n + 1)[:, None].log())
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    compiled = torch.compile(model, backend="ring", dynamic=True, options={"inner_backend": "eager"})
    torch._dynamo.reset()
    assert difference(run(compiled, model, {"x": x}), run(model, model, {"x": x})) < 1e-10
    assert ringopt.reports()[-1].refusal is None


def test_one_process_takes_the_causal_flag():
    """The mask transformers builds goes; numbers stay."""
    model, inputs = build("llama", 67)
    with torch.no_grad():
        found = torch.compile(model, backend="ring", options={"inner_backend": "eager"})(**inputs).logits
        assert difference([found], [model(**inputs).logits]) < 1e-5
    assert ringopt.reports()[-1].world_size == 1
    flat = transform(*captured(model, **inputs), Options(), mesh_of("pretend:0/1")).graph
    sites = [node for node in flat.graph.nodes if op_name(node) == "attention"]
    assert [(site.args[3], site.args[7], site.args[8]) for site in sites] == [(None, "causal", "")] * 2


def test_a_graph_that_no_compiler_takes_is_run_as_it_is(caplog):
    """Dynamo has such a graph where it knows the number behind a break in what a function calls (st-moe)."""
    known = torch.fx.symbolic_trace(lambda x, n: (F.one_hot(x, n).sum(0) * 2,))
    compiled = torch.compile(lambda x, n: x.sum() * n, backend=lambda gm, inputs: ring(known, inputs))
    assert compiled(torch.tensor([0, 2, 1, 2]), torch.tensor(4)).tolist() == [2, 2, 4, 0]
    assert "run as it is, for no compiler can: aten._local_scalar_dense" in caplog.text

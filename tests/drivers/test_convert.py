"""`ringopt.convert`: one file, exact on any number of ranks, eager and compiled; and what it keeps."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch.export import Dim, ExportedProgram, export
from torch.utils.checkpoint import checkpoint

import ringopt
from ringopt.distributed.roll_call.batch import LABEL
from ringopt.drivers.convert import convert_program
from ringopt.errors import PlanError, RingMismatchError
from tests import zoo
from tests.harness.converting import Mixer, exported, rows
from tests.harness.errors import worst_of
from tests.harness.models import build, difference, run

TOLERANCE = 1e-9  # float64, relative to the largest entry

# ---- exact on any number of ranks ------------------------------------------------------------------------------------
PACKAGES = ("timm/vit@sdpa", "diffusers/pixart@eager", "hand/nano_causal_and_padding")
MODELS = ("encoder_causal", "vit", "llama_padded", "llama", "gpt2", "bert", "t5", "mistral", "encoder", *PACKAGES)


def made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model of tests/harness/models.py, or with a family in its name of tests/zoo, in float64."""
    if "/" not in name:
        return build(name, 21, torch.float64)
    model, inputs = zoo.build(name, 21)
    floats = {key: x.double() for key, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
    return model.double(), {**inputs, **floats}


def save_both(folder: Path, name: str) -> list[Tensor]:
    """A model as an exported and as a converted file; what the first computes, gradients included."""
    (folder / name).parent.mkdir(exist_ok=True)
    model, inputs = made(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.export, about transformers
        program = export(model, (), inputs)
        torch.export.save(program, folder / f"{name}_whole.pt2")
        torch.export.save(ringopt.convert(program), folder / f"{name}.pt2")
    whole = ringopt.load(folder / f"{name}_whole.pt2").module()
    return run(whole, whole, inputs)


def distance(folder: Path, name: str, wanted: list[Tensor]) -> float:
    import transformers.modeling_outputs  # noqa: F401  (files name its classes)

    module = ringopt.load(folder / f"{name}.pt2").module()
    return difference(run(module, module, made(name)[1]), wanted)


@pytest.mark.sample(100)
@pytest.mark.parametrize("name", MODELS)
def test_one_file_is_exact_on_any_number_of_ranks(name: str, ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Outputs and the gradients of all parameters, of a length that 3 ranks do not share evenly."""
    if "/" in name and zoo.missing(zoo.family(name)):
        pytest.skip(zoo.missing(zoo.family(name)))
    wanted = save_both(tmp_path, name)
    for p in (1, 3):
        assert max(ranks(p, distance, tmp_path, name, wanted)) < TOLERANCE


def test_torch_says_what_reads_a_file(tmp_path: Path) -> None:
    """A process that has not imported ringopt's operators, in torch's own error; with them torch reads it too."""
    torch.export.save(ringopt.convert(exported()), tmp_path / "mixer.pt2")
    found = torch.export.load(tmp_path / "mixer.pt2").module()
    torch.testing.assert_close(found(rows()), exported().module()(rows()))
    script = f"import ringopt, torch; torch.export.load({str(tmp_path / 'mixer.pt2')!r})"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "ringopt.load(path)" in ended.stderr


def compiled_distances(file: Path, wanted: dict[int, list[Tensor]]) -> list[float]:
    module = ringopt.load(file).module()
    compiled = torch.compile(module, backend="inductor")
    found = {n: run(lambda x: compiled(x), module, {"x": rows(n).double()}) for n in wanted}
    return [difference(found[n], wanted[n]) for n in wanted]


@pytest.mark.zoo
@pytest.mark.parametrize("p, dim", [*((p, Dim("n", min=8, max=99)) for p in (1, 2, 3)), (2, 2 * Dim("half") + 1)])
def test_through_inductor_on_any_number_of_ranks(p: int, dim: Dim, ranks: Callable[..., Any], tmp_path: Path) -> None:
    """Of a length that is open in the file, which neither 2 nor 3 ranks share evenly."""
    program = export(Mixer().double(), (rows(17).double(),), dynamic_shapes=({1: dim},))
    torch.export.save(ringopt.convert(program), tmp_path / "mixer.pt2")
    whole = program.module()
    wanted = {n: run(lambda x: whole(x), whole, {"x": rows(n).double()}) for n in (17, 31)}
    assert max(map(max, ranks(p, compiled_distances, tmp_path / "mixer.pt2", wanted))) < TOLERANCE


def input_gradient(file: Path) -> Tensor:
    x = rows().requires_grad_()
    ringopt.load(file).module()(x).sin().sum().backward()
    assert x.grad is not None
    return x.grad


def test_an_input_gets_its_whole_gradient_on_every_rank(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    torch.export.save(exported(), tmp_path / "whole.pt2")
    torch.export.save(ringopt.convert(exported()), tmp_path / "mixer.pt2")
    wanted = input_gradient(tmp_path / "whole.pt2")
    for found in ranks(2, input_gradient, tmp_path / "mixer.pt2"):
        torch.testing.assert_close(found, wanted)


class MixingRows(Mixer):
    """Ops that mix rows: what they need of the number of ranks is asked when the program runs, or they gather."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y = y + self.conv(y.transpose(1, 2)).transpose(1, 2)
        y = y - y.roll(1, 1) + y.cumsum(1) + y.amax(1, keepdim=True) + y.flip(1)
        y = y + y.max(1, keepdim=True).values * (y > 3).any(1, keepdim=True)
        return y[:, 2:] * y[:, :-2] + F.pad(y, (0, 0, 1, 0))[:, :-3] + y[:, :1]


def mixed(file: Path) -> tuple[list[Tensor], int]:
    """Outputs and gradients; and the bytes that a second forward sends, but for the digests of its inputs."""
    module = ringopt.load(file).module()
    found = run(lambda x: module(x), module, {"x": rows(17).double()})
    with torch.no_grad(), ringopt.record_traffic() as traffic:
        module(rows(17).double())
    return found, sum(event.bytes for event in traffic.events if event.label != LABEL)


@pytest.mark.zoo
def test_ops_that_mix_rows_are_exact(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    program = export(MixingRows().double(), (rows(17).double(),))
    whole, after = program.module(), ringopt.convert(program)
    wanted = run(lambda x: whole(x), whole, {"x": rows(17).double()})
    torch.export.save(after, tmp_path / "mixing.pt2")
    for p in (1, 3):
        for found, _sent in ranks(p, mixed, tmp_path / "mixing.pt2"):
            assert difference(found, wanted) < TOLERANCE


class OneRotatedPair(nn.Module):
    """One head of two numbers, of which the halves are of size 1: dims of size 1 around the open one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None].expand(-1, 2)
        turned = [torch.cat((-t[..., 1:], t[..., :1]), -1) * angles.sin() + t * angles.cos() for t in (q, k)]
        return F.scaled_dot_product_attention(*turned, v, is_causal=True).squeeze(1)


def turned_on_rank(path: str) -> float:
    model = OneRotatedPair()
    loaded = ringopt.load(path).module()
    return difference(run(lambda x: loaded(x), loaded, {"x": rows(13)}), run(model, model, {"x": rows(13)}))


def test_halves_of_size_1(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    program = ringopt.convert(exported(OneRotatedPair(), 13))
    assert "ring_attention" in str(program.graph)
    torch.export.save(program, tmp_path / "pair.pt2")
    assert max(ranks(2, turned_on_rank, str(tmp_path / "pair.pt2"))) < 1e-5


class Recurrent(nn.Module):
    """A gated recurrence, token by token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        gates, state, found = 0.9 + 0.1 * self.gate(x).sigmoid(), torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = state * gates[:, t] + x[:, t]
            found.append(state)
        return self.out(torch.stack(found, 1))  # type: ignore[no-any-return]


class InRounds(Recurrent):
    """The same, which torch.export writes as a tree over halves of the rows."""

    def forward(self, x: Tensor) -> Tensor:
        def combine(left: Any, right: Any) -> Any:
            return left[0] * right[0], right[0] * left[1] + right[1]

        gates = 0.9 + 0.1 * self.gate(x).sigmoid()
        return self.out(associative_scan(combine, (gates, x), dim=1, combine_mode="generic")[1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Recurrent, InRounds])
def test_a_recurrence_is_shared_by_any_number_of_ranks(
    ranks: Callable[..., list[Any]], tmp_path: Path, kind: type[Recurrent]
) -> None:
    program = export(kind().double(), (rows(17).double(),))
    whole, after = program.module(), ringopt.convert(program)
    assert [node.target for node in after.graph.nodes].count(torch.ops.ringopt.sharded_scan.default) == 1
    wanted = run(lambda x: whole(x), whole, {"x": rows(17).double()})
    torch.export.save(after, tmp_path / "recurrent.pt2")
    for found, _sent in ranks(3, mixed, tmp_path / "recurrent.pt2"):
        assert difference(found, wanted) < TOLERANCE


LENGTHS = (17, 30, 9)


def at_lengths(file: Path) -> list[list[Tensor]]:
    module = ringopt.load(file).module()
    # An input of an exported program has no name.
    return [run(lambda x: module(x), module, {"x": rows(n).double()}) for n in LENGTHS]


def test_one_file_serves_all_lengths(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    program = export(MixingRows().double(), (rows(17).double(),), dynamic_shapes=({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},))
    torch.export.save(program, tmp_path / "whole.pt2")
    torch.export.save(ringopt.convert(program), tmp_path / "open.pt2")
    wanted = at_lengths(tmp_path / "whole.pt2")
    for found in ranks(3, at_lengths, tmp_path / "open.pt2"):
        assert worst_of(*map(difference, found, wanted)) < TOLERANCE


class Shifted(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return (y[:, 1:] - y[:, :-1]).square().mean()


def test_bytes_are_those_that_were_sent(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    after = ringopt.convert(export(Shifted().double(), (rows(17).double(),)))
    torch.export.save(after, tmp_path / "shifted.pt2")
    for p in (2, 3):
        _found, sent = ranks(p, mixed, tmp_path / "shifted.pt2")[0]
        assert ringopt.diff(after, tmp_path / "shifted.pt2", world_size=p).after.bytes_sent == sent


def error_of(file: Path, n: int, *alike: bool) -> str:
    """Of so many calls, one after the other."""
    program = ringopt.load(file).module()
    try:
        for each in alike:
            program(rows(n, seed=1 if each else dist.get_rank()))
    except (PlanError, RingMismatchError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.zoo
def test_ranks_with_other_inputs_are_told(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    torch.export.save(ringopt.convert(exported(n=15)), tmp_path / "checked.pt2")
    torch.export.save(ringopt.convert(exported(n=15), {"check_inputs": "never"}), tmp_path / "trusting.pt2")
    for said in ranks(2, error_of, tmp_path / "checked.pt2", 15, False):
        assert said.startswith("RingMismatchError: inputs differ from those of rank 0: x on ranks [1]")
    for said in ranks(2, error_of, tmp_path / "checked.pt2", 15, True, True, False, True):
        assert "x on ranks [1] (other numbers in [" in said
    assert ranks(2, error_of, tmp_path / "checked.pt2", 15, True, True) == ["", ""]
    assert ranks(2, error_of, tmp_path / "trusting.pt2", 15, False) == ["", ""]


def test_too_many_ranks_are_told(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    torch.export.save(ringopt.convert(exported(n=7), {"layout": "contiguous"}), tmp_path / "short.pt2")
    torch.export.save(ringopt.convert(exported(n=6)), tmp_path / "zigzag.pt2")
    assert ranks(4, error_of, tmp_path / "short.pt2", 7, True) == [""] * 4
    for said in ranks(4, error_of, tmp_path / "zigzag.pt2", 6, True):
        assert said == "PlanError: this program has a zigzag sequence of 6 rows, and 4 ranks need 8; use fewer"


def members(program: ExportedProgram) -> dict[str, bytes]:
    saved = io.BytesIO()
    torch.export.save(program, saved)
    with zipfile.ZipFile(saved) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.zoo
@pytest.mark.parametrize("name", MODELS)
def test_converting_a_model_twice_gives_the_same_bytes(name: str) -> None:
    if "/" in name and zoo.missing(zoo.family(name)):
        pytest.skip(zoo.missing(zoo.family(name)))
    model, inputs = made(name)
    program = export(model, (), inputs)
    assert members(ringopt.convert(program)) == members(ringopt.convert(program))


# ---- what is kept ----------------------------------------------------------------------------------------------------
def test_signature_state_and_call_are_those_of_the_program() -> None:
    before, after = exported(), ringopt.convert(exported())
    kinds = [(spec.kind, spec.target) for spec in before.graph_signature.input_specs]
    assert [(spec.kind, spec.target) for spec in after.graph_signature.input_specs] == kinds
    assert before.call_spec == after.call_spec
    assert list(after.state_dict) == ["qkv.weight", "qkv.bias", "out.weight", "out.bias"]


def test_the_program_given_is_not_changed() -> None:
    program = exported()
    ringopt.convert(program)
    assert ringopt.diff(program, exported()).same


def test_converting_twice_gives_one_program(tmp_path: Path) -> None:
    torch.export.save(ringopt.convert(exported()), tmp_path / "first.pt2")
    assert ringopt.diff(tmp_path / "first.pt2", ringopt.convert(exported())).same


def test_a_buffer_that_the_program_writes_is_written(tmp_path: Path) -> None:
    class Counting(Mixer):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return super().forward(x)

    torch.export.save(ringopt.convert(exported(Counting())), tmp_path / "counting.pt2")
    module = ringopt.load(tmp_path / "counting.pt2").module()
    module(rows())
    module(rows())
    assert float(module.count) == 2


@pytest.mark.zoo
def test_a_diff_lists_the_sites_that_explain_lists() -> None:
    model, inputs = build("encoder_causal", 24)
    program = export(model, (), inputs)
    after = ringopt.convert(program)
    report = ringopt.explain(model, **inputs, world_size=2)
    diff = ringopt.diff(program, after, world_size=2)
    found = [
        (c.after.module, c.after.site.pattern, c.after.site.strategy) for c in diff.sites if c.after and c.after.site
    ]
    assert found == [(site.module, site.pattern, site.strategy) for site in report.sites]
    assert [c.after.bytes_sent for c in diff.sites if c.after] == [site.bytes_sent for site in report.sites]
    assert diff.after.bytes_sent is not None and diff.after.flops is not None
    assert ringopt.diff(program, after).after.bytes_sent is None


def test_the_report_is_that_of_the_file() -> None:
    """Not of a run on as many ranks, which would know its machine, and start exchanges early."""
    program, report = convert_program(exported())
    [site] = report.sites
    [found] = [change.after.site for change in ringopt.diff(program, program).sites if change.after]
    assert found is not None and (found.pattern, found.strategy, found.layout) == ("causal", site.strategy, site.layout)
    assert site.notes[-1].endswith("a program for any number of ranks runs in the order in which it is written")


def test_options_choose() -> None:
    program = ringopt.convert(exported(), {"layout": "contiguous", "strategy": "gather"})
    [site] = [c.after.site for c in ringopt.diff(program, program).sites if c.after]
    assert site is not None and (site.layout, site.strategy) == ("contiguous", "gather")


@pytest.mark.parametrize("kind", ["checkpoint", "function"])
def test_what_export_may_have_lost_is_told(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    class Lossy(Mixer):
        def forward(self, x: Tensor) -> Tensor:
            if kind == "function":
                return Doubled.apply(super().forward(x))  # type: ignore[no-any-return, no-untyped-call]
            return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]

    report = convert_program(exported(Lossy()))[1]
    wanted = {"checkpoint": "activation checkpointing", "function": "the backward of a custom autograd.Function"}[kind]
    assert any(note.startswith(f"export may have lost {wanted}") for note in report.notes)
    assert [record.message for record in caplog.records if "export" in record.message] == list(report.notes)
    assert convert_program(exported())[1].notes == ()

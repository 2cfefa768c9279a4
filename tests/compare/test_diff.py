"""`ringopt.diff` of real programs: GraphModules, ExportedPrograms and files, with what their nodes mean."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from rich.console import Console
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

import ringopt
from ringopt.errors import ProgramError
from ringopt.passes import LINE
from ringopt.tools.diff_text import rendered
from tests.harness.capturing import after


class Mixer(nn.Module):
    """One attention site between two projections."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.squeeze(1)).relu()


class Gelu(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return nn.functional.gelu(self.out(mixed.squeeze(1)))


class Padded(Mixer):
    """What a mask made of an input hides is not known before it comes; what is after the query is."""

    def forward(self, x: Tensor, there: Tensor | None = None) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        rows = torch.arange(x.shape[1])
        mask = (rows[:, None] >= rows) & (there[:, None, None, :] > 0 if there is not None else True)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, mask).squeeze(1))


def exported(module: nn.Module | None = None, rows: int = 16, dynamic: bool = False) -> ExportedProgram:
    shapes = ({1: Dim("n", min=4, max=64)},) if dynamic else None
    return export(module or Mixer(), (torch.zeros(1, rows, 8),), dynamic_shapes=shapes)


class Ascii(io.StringIO):
    """A file of these letters only: no others are written by EXPECTTEST_ACCEPT=1."""

    encoding = "ascii"


def text(diff: ringopt.GraphDiff, **how: bool) -> str:
    console = Console(width=100, file=Ascii(), highlight=False)
    console.print(rendered(diff, **how), soft_wrap=True)
    assert isinstance(console.file, Ascii)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


@pytest.fixture(scope="module")
def sharded() -> ringopt.GraphDiff:
    """Before and after the passes, for rank 0 of 4."""
    module, x = Mixer(), torch.zeros(1, 16, 8)
    before, _ = after([], module, x)
    graph, _ = after(LINE, module, x, ranks=4)
    return ringopt.diff(before, graph)


def test_the_text_of_sharding_one_attention(sharded: ringopt.GraphDiff) -> None:
    assert_expected_inline(
        text(sharded),
        """\
18 nodes before, 26 after: 5 same, 8 resized, 3 rerouted, 2 replaced, 8 added
sent by this rank in one forward, bytes: 0 -> 1,024
FLOPs of products on this rank: 12,544 -> 3,136
1 attention site
+------------------------------------------------------------+
| module | before | after                           | reason |
|--------+--------+---------------------------------+--------|
| -      | causal | causal: ring, zigzag, flash_cpu |        |
+------------------------------------------------------------+

qkv
  + %x_rows = ringopt::scatter(%x, 1, 1, 16, 1, 4, 'zigzag', 'pretend:0/4')  # f32[1, 4, 8] S(1)
  + %qkv_weight_copied = getitem(%bucket, 2)  # f32[24, 8] replicated
  + %qkv_bias_copied = getitem(%bucket, 3)  # f32[24] replicated
  ~ %linear = linear(%x_rows, %qkv_weight_copied, %qkv_bias_copied)
      input 0: %x replicated -> %x_rows S(1)
      input 1: %qkv_weight replicated -> %qkv_weight_copied replicated
      input 2: %qkv_bias replicated -> %qkv_bias_copied replicated
      shape: f32[1, 16, 24] -> f32[1, 4, 24]
      placement: replicated -> S(1)
      FLOPs: 6144 -> 1536

(no module)
  + %bucket = ringopt::copy_all_to_group([%out_weight, %out_bias, %qkv_weight, %qkv_bias], 'pretend:0/4')  # (f32[8, 8], f32[8], f32[24, 8], f32[24]) replicated
  - %scaled_dot_product_attention = scaled_dot_product_attention(%unsqueeze, %unsqueeze_1, %unsqueeze_2, None, 0, True)
  + %attention_ring_attention = ringopt::ring_attention(%unsqueeze, %unsqueeze_1, %unsqueeze_2, [], None, None, 16, 16, 'causal', '', [], 0, 0.353553, 'zigzag', 'zigzag', 'ring', 'flash_cpu', 'pretend:0/4', 'backward')
      shape: f32[1, 1, 16, 8] -> (f32[1, 1, 4, 8], f32[1, 1, 4])
      placement: replicated -> S(2)
      bytes sent: 0 -> 640
      FLOPs: 4352 -> 1088
  + %attention = getitem(%attention_ring_attention, 0)  # f32[1, 1, 4, 8] S(2)
  - %squeeze = squeeze.dim(%scaled_dot_product_attention, 1)
  + %squeeze = reshape(%attention, [1, -1, 8])
      shape: f32[1, 16, 8] -> f32[1, 4, 8]
      placement: replicated -> S(1)
  + %relu_whole = ringopt::gather(%relu, 1, 1, 16, 1, 'zigzag', 'pretend:0/4')  # f32[1, 16, 8] replicated
  ~ return [%relu_whole]
      input: %relu replicated -> %relu_whole replicated
  ... 8 resized

out
  + %out_weight_copied = getitem(%bucket, 0)  # f32[8, 8] replicated
  + %out_bias_copied = getitem(%bucket, 1)  # f32[8] replicated
  ~ %linear_1 = linear(%squeeze, %out_weight_copied, %out_bias_copied)
      input 1: %out_weight replicated -> %out_weight_copied replicated
      input 2: %out_bias replicated -> %out_bias_copied replicated
      shape: f32[1, 16, 8] -> f32[1, 4, 8]
      placement: replicated -> S(1)
      FLOPs: 2048 -> 512
elsewhere: 5 same""",  # noqa: E501
    )


def test_layers_are_folded_and_long_lists_cut() -> None:
    """Their parameters have other places in one bucket, which is no difference between them."""
    program = exported(nn.Sequential(*[Mixer() for _ in range(4)]))
    diff = ringopt.diff(program, ringopt.convert(program))
    said = text(diff)
    assert "\n0.out  (and 3 like it: 1.out .. 3.out)\n" in said
    assert "copy_all_to_group([%p_3_out_weight, %p_3_out_bias, %p_3_qkv_weight, ... 13 more], 'any')" in said
    assert diff.counts["changed"] == 0  # nn.Sequential calls its input `input`, and so does the converted program


def test_numbers_of_nodes_by_module(sharded: ringopt.GraphDiff) -> None:
    assert_expected_inline(
        text(sharded, stat=True),
        """\
18 nodes before, 26 after: 5 same, 8 resized, 3 rerouted, 2 replaced, 8 added
sent by this rank in one forward, bytes: 0 -> 1,024
FLOPs of products on this rank: 12,544 -> 3,136
1 attention site
+------------------------------------------------------------+
| module | before | after                           | reason |
|--------+--------+---------------------------------+--------|
| -      | causal | causal: ring, zigzag, flash_cpu |        |
+------------------------------------------------------------+
nodes by module
+--------------------------------------------------------------------------------+
| module      | added | removed | replaced | rerouted | changed | resized | same |
|-------------+-------+---------+----------+----------+---------+---------+------|
| qkv         |     3 |         |          |        1 |         |         |      |
| (no module) |     3 |         |        2 |        1 |         |       8 |      |
| out         |     2 |         |          |        1 |         |         |      |
+--------------------------------------------------------------------------------+""",
    )


def test_sites_bytes_and_reasons_agree_with_explain(sharded: ringopt.GraphDiff) -> None:
    report = ringopt.explain(Mixer(), torch.zeros(1, 16, 8), world_size=4)
    [change], [site] = sharded.sites, report.sites
    assert change.before is not None and change.after is not None and change.after.site is not None
    found = change.after.site
    assert (found.pattern, found.strategy, found.layout, found.kernel) == (
        site.pattern, site.strategy, site.layout, site.kernel,
    )  # fmt: skip
    assert change.after.bytes_sent == site.bytes_sent
    assert sharded.after.bytes_sent == report.bytes_sent
    assert change.before.flops == 4 * change.after.flops == 2 * 16 * 17 // 2 * (8 + 8)


def test_the_mask_is_drawn_in_blocks(sharded: ringopt.GraphDiff) -> None:
    [change] = sharded.sites
    assert change.after is not None and change.after.site is not None
    assert change.after.site.mask[:3] == ("#...............", "##..............", "###.............")


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_new_trace_and_a_file_are_the_same_program(dynamic: bool, tmp_path: Path) -> None:
    file = tmp_path / "a.pt2"
    torch.export.save(exported(dynamic=dynamic), file)
    assert ringopt.diff(file, str(file)).same
    assert ringopt.diff(file, exported(dynamic=dynamic)).same


def test_an_operator_and_a_flag_that_differ() -> None:
    diff = ringopt.diff(exported(), exported(Gelu()))
    said = {c.node.op: (c.kind, [a.name for a in c.aspects]) for c in diff.changes if c.kind != "same"}
    assert said == {
        "scaled_dot_product_attention": ("changed", ["arguments", "FLOPs"]),
        "gelu": ("replaced", ["op"]),
    }
    [site] = diff.sites
    assert site.before is not None and site.before.site is not None and site.before.site.pattern == "causal"
    assert site.after is not None and site.after.site is not None and site.after.site.pattern == "full"


def test_another_length_resizes() -> None:
    kinds = {change.kind for change in ringopt.diff(exported(), exported(rows=12)).changes}
    assert kinds == {"same", "resized"}


def test_other_weights_are_a_difference() -> None:
    other = Mixer()
    with torch.no_grad():
        other.out.bias.add_(1)
    [change] = [c for c in ringopt.diff(exported(), exported(other)).changes if c.kind != "same"]
    assert (change.kind, change.node.arguments) == ("changed", "parameter out.bias")
    assert [(a.name, a.after) for a in change.aspects] == [("values", "other values")]


def test_what_stands_inside_a_nested_graph_is_compared() -> None:
    class Nested(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = x * self.factor
            return x + y

    sides = [export(Nested(factor), (torch.zeros(2, 3, requires_grad=True),)) for factor in (2.0, 3.0)]
    assert ringopt.diff(sides[0], sides[0]).same
    [change] = [c for c in ringopt.diff(*sides).changes if c.kind != "same"]
    assert (change.kind, change.node.op) == ("changed", "mul.Tensor")


def test_unrelated_programs_stay_readable() -> None:
    convolution = export(nn.Sequential(nn.Conv1d(3, 4, 3), nn.Tanh()), (torch.zeros(2, 3, 9),))
    diff = ringopt.diff(exported(), convolution)
    assert not diff.same
    assert len(text(diff).splitlines()) < 60


def test_to_dict_is_json_with_the_documented_keys(sharded: ringopt.GraphDiff) -> None:
    data = json.loads(json.dumps(sharded.to_dict()))
    assert data["schema"] == 3
    assert set(data) == {
        "schema", "same", "counts", "before", "after", "compared", "first_bad", "gradients_compared",
        "first_bad_gradient", "no_gradients", "overlays", "changes",
    }  # fmt: skip
    assert sum(data["counts"].values()) == len(sharded.changes)
    [site] = [change for change in data["changes"] if (change["after"] or {}).get("site")]
    assert site["kind"] == "replaced"
    assert set(site["after"]) == {
        "name", "op", "text", "arguments", "inputs", "module", "source", "shape", "placement", "bytes_sent", "flops",
        "site", "result_bytes", "device", "path",
    }  # fmt: skip


# ---- what is refused -------------------------------------------------------------------------------------------------
class Evil:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return print, ("code of a stranger ran",)


def tampered(path: Path, member: str, content: bytes) -> None:
    """A good file with one member written anew."""
    good = io.BytesIO()
    torch.export.save(exported(), good)
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            target.writestr(name, content if name.endswith(member) else source.read(name))


def broken(path: Path, kind: str) -> None:
    if kind == "text":
        path.write_text("hello")
    elif kind == "folder":
        path.mkdir()
    elif kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/b", "c")
    elif kind == "state dict":
        torch.save({"weight": torch.zeros(2)}, path)
    elif kind == "pickle":
        tampered(path, "sample_inputs/model.pt", pickle.dumps(Evil()))
    elif kind == "newer":
        tampered(path, "models/model.json", b'{"schema_version": {"major": 99}, "torch_version": "9.9"}')


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("absent", "does not exist; expected a .pt2 file"),
        ("folder", "is a folder; expected a .pt2 file"),
        ("text", "is not a .pt2 file"),
        ("zip", "is not a .pt2 file of torch.export.save: no program in it"),
        ("state dict", "is not a .pt2 file of torch.export.save: no program in it"),
        ("newer", "was written by torch 9.9 in format 99, and torch "),
        ("pickle", "holds pickled objects other than tensors, which may run any code; it is not loaded"),
    ],
)
def test_what_is_no_program_is_refused(
    kind: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.pt2"
    broken(path, kind)
    with pytest.raises(ProgramError) as refused:
        ringopt.diff(path, path)
    assert str(path) in str(refused.value)
    assert sentence in str(refused.value)
    assert "stranger" not in capsys.readouterr().out


def test_a_mask_is_drawn_as_far_as_it_is_known() -> None:
    program = export(Padded(), (torch.zeros(1, 8, 8), torch.ones(1, 8)))
    [site] = ringopt.diff(program, ringopt.convert(program)).sites
    assert site.before is not None and site.before.site is not None
    assert site.after is not None and site.after.site is not None
    assert site.before.site.mask == ("?" * 8,) * 8
    assert site.after.site.mask == tuple("?" * row + "." * (8 - row) for row in range(1, 9))


def test_another_object_is_refused() -> None:
    with pytest.raises(ProgramError, match="Mixer cannot be compared; expected an ExportedProgram, a GraphModule or"):
        ringopt.diff(Mixer(), Mixer())  # type: ignore[arg-type]

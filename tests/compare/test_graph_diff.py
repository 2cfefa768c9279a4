"""Which node is which, and what a diff says of them: on views made by hand."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ringopt.compare.graph_diff import NodeView, SiteView, diff_views


def program(text: str, module: str = "m", source: str = "") -> list[NodeView]:
    """Views of lines such as `y = relu(x)`; `x = input` is an input, a trailing `@layer` names the module."""
    views = []
    for line in text.strip().splitlines():
        said, _, where = line.strip().partition(" @")
        name, _, call = said.partition(" = ")
        op, _, arguments = call.partition("(")
        known = [view.name for view in views]
        inputs = tuple(word for word in re.findall(r"\w+", arguments) if word in known)
        for word in inputs:
            arguments = re.sub(rf"\b{word}\b", "%", arguments)
        template = name if op == "input" else arguments.removesuffix(")")
        views.append(NodeView(name, op, said, template, inputs, where or module, source))
    return views


def kinds(before: list[NodeView], after: list[NodeView]) -> dict[str, str]:
    """What happened to each node, by its name after (or before, where it is gone); `same` is left out."""
    return {c.node.name: c.kind for c in diff_views(before, after).changes if c.kind != "same"}


CHAIN = """
x = input
w = input
y = linear(x, w)
z = relu(y)
out = output(z)
"""


def test_a_program_has_no_difference_from_itself() -> None:
    diff = diff_views(program(CHAIN), program(CHAIN))
    assert diff.same
    assert str(diff) == "5 nodes before, 5 after: 5 same"


def test_a_notebook_shows_kinds_and_the_first_attentions() -> None:
    def attending(pattern: str) -> list[NodeView]:
        views = program("x = input\n" + "".join(f"y{n} = attention(x) @layer<{n}>\n" for n in range(14)))
        site = SiteView(pattern, "ring", "zigzag", "math", "")
        return [view if view.op == "input" else replace(view, site=site) for view in views]

    page = diff_views(attending("none"), attending("causal"))._repr_html_()
    assert "<td>same</td><td>15</td>" in page
    assert page.count("<td>none, ring, zigzag</td><td>causal, ring, zigzag</td>") == 12 and "and 2 more" in page
    assert "layer&lt;0&gt;" in page and "layer<" not in page


def test_names_do_not_matter() -> None:
    renamed = CHAIN.replace("y", "linear_7").replace("z", "relu_3")
    assert kinds(program(CHAIN), program(renamed)) == {}


def test_a_name_that_another_node_took_over_does_not_confuse() -> None:
    before = "x = input\na = exp(x)\nb = sin(a)\nout = output(b)"
    after = "x = input\nb = exp(x)\na = sin(b)\nout = output(a)"
    assert kinds(program(before), program(after)) == {}


def test_another_operator_in_the_same_place_replaces() -> None:
    assert kinds(program(CHAIN), program(CHAIN.replace("relu", "gelu"))) == {"z": "replaced"}


def test_another_argument_changes() -> None:
    assert kinds(program(CHAIN), program(CHAIN.replace("relu(y)", "relu(y, 2)"))) == {"z": "changed"}


def test_an_inserted_node_is_added_and_its_reader_rerouted() -> None:
    after = CHAIN.replace("z = relu(y)", "n = norm(y)\nz = relu(n)")
    diff = diff_views(program(CHAIN), program(after))
    assert kinds(program(CHAIN), program(after)) == {"n": "added", "z": "rerouted"}
    [rerouted] = [change for change in diff.changes if change.kind == "rerouted"]
    assert [(a.name, a.before, a.after) for a in rerouted.aspects] == [
        ("input", "%y replicated", "%n replicated"),
    ]


def test_a_removed_node_stands_where_it_stood() -> None:
    before = CHAIN.replace("z = relu(y)", "n = norm(y)\nz = relu(n)")
    diff = diff_views(program(before), program(CHAIN))
    assert [change.node.name for change in diff.changes] == ["x", "w", "y", "n", "z", "out"]
    assert kinds(program(before), program(CHAIN)) == {"n": "removed", "z": "rerouted"}


def test_exchanged_operands_are_rerouted() -> None:
    before = "x = input\ny = input\nz = sub(x, y)\nout = output(z)"
    after = before.replace("sub(x, y)", "sub(y, x)")
    assert kinds(program(before), program(after)) == {"z": "rerouted"}


def test_conversions_are_looked_through_so_that_readers_keep_their_counterparts() -> None:
    before = "x = input\nq = mul(x, 2)\nk = mul(x, 2)\ny = attend(q, k)\nout = output(y)"
    after = """
    x = input
    r = ringopt::scatter(x)
    k = mul(r, 2)
    q = mul(r, 2)
    y = attend(q, k)
    g = ringopt::gather(y)
    out = output(g)
    """
    changes = diff_views(program(before), program(after)).changes
    found = {c.after.name: c.before.name for c in changes if c.before and c.after}
    assert found == {"x": "x", "q": "q", "k": "k", "y": "y", "out": "out"}
    assert kinds(program(before), program(after)) == {
        "r": "added", "k": "rerouted", "q": "rerouted", "g": "added", "out": "rerouted",
    }  # fmt: skip


def test_readers_tell_values_of_one_line_apart() -> None:
    """cos and sin of a rotary embedding, which a rewrite makes by other operators and in the other order, for queries
    of another size."""

    def embedded(size: int, made: str) -> str:
        turned = "a = mul(heads, c)\nhalf = rotate(heads)\nb = mul(half, s)\nsum = add(a, b)"
        return (
            f"x = input\nq = input\nheads = view(q, {size})\n{made}\n{turned}\ny = view(sum, {size})\nout = output(y)"
        )

    before = embedded(16, "r = rotary(x)\np = left(r)\no = right(r)\nc = unsqueeze(p, 1)\ns = unsqueeze(o, 1)")
    after = embedded(8, "o = sin(x)\np = cos(x)\ns = unsqueeze(o, 1)\nc = unsqueeze(p, 1)")
    changes = diff_views(program(before), program(re.sub(r"\b([scabpo])\b", r"\1_1", after))).changes
    found = {c.before.name: c.after.name for c in changes if c.before and c.after}
    assert (found["c"], found["s"]) == ("c_1", "s_1")


def test_modules_and_source_lines_tell_equal_operators_apart() -> None:
    before = "x = input\na = relu(x, 0) @first\nb = relu(a, 0) @second\nout = output(b)"
    after = "x = input\nb = relu(x, 0) @second\nout = output(b)"
    assert kinds(program(before), program(after)) == {"a": "removed", "b": "rerouted"}


def test_inputs_of_other_names_are_matched_by_shape() -> None:
    before, after = program(CHAIN), program(CHAIN.replace("w", "model_w"))
    shapes = {"x": "f32[2, 3]", "w": "f32[4, 3]", "model_w": "f32[4, 3]"}
    sized = [[replace(view, shape=shapes.get(view.name, "")) for view in side] for side in (before, after)]
    assert kinds(*sized) == {"model_w": "changed"}


def test_unrelated_programs_have_only_their_inputs_in_common() -> None:
    other = "x = input\na = conv(x)\nb = pool(a)\nc = exp(b)\nout = output(c)"
    assert kinds(program(CHAIN, "one"), program(other, "two")) == {
        "w": "removed", "a": "added", "b": "replaced", "c": "replaced",
    }  # fmt: skip


def test_only_sizes_differ() -> None:
    after = [replace(view, shape="f32[2]", placement="S(0)") if view.name == "z" else view for view in program(CHAIN)]
    assert kinds(program(CHAIN), after) == {"z": "resized"}


def test_totals_are_unknown_where_a_part_is() -> None:
    some = [replace(view, bytes_sent=8, flops=None) if view.name == "z" else view for view in program(CHAIN)]
    diff = diff_views(program(CHAIN), some)
    assert (diff.before.bytes_sent, diff.after.bytes_sent) == (0, 8)
    assert (diff.before.flops, diff.after.flops) == (0, None)


@pytest.mark.zoo
@pytest.mark.parametrize("layers", [400])
def test_thousands_of_nodes(layers: int) -> None:
    """A layer inserted in the middle; every other node finds its counterpart."""

    def chain(numbers: list[int]) -> list[NodeView]:
        lines = ["x = input"]
        last = "x"
        for number, layer in enumerate(numbers):
            for step in range(12):
                lines.append(f"n{number}_{step} = op{step}({last}, 0) @layer.{layer}")
                last = f"n{number}_{step}"
        return program("\n".join([*lines, f"out = output({last})"]))

    whole = list(range(layers))
    diff = diff_views(chain(whole), chain([*whole[:200], 9999, *whole[200:]]))
    assert diff.counts["added"] == 12
    assert diff.counts["rerouted"] == 1
    assert diff.counts["same"] == 12 * layers + 1

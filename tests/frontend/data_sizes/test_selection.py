"""Names that stand for another tensor behind a branch that data decide: the program is one graph, in which the tensor
is selected, where that is cheap and nobody can tell."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ringopt
from tests.frontend.data_sizes.test_predication import traced
from tests.harness.models import difference, run

X = torch.tensor([[0.5, 2.0], [-1.0, -3.0]])


# ---- the graph -------------------------------------------------------------------------------------------------------
def adds_one(x):
    y = torch.zeros_like(x)
    if (x > 1).any():
        y = y + 1
    return y


def takes_another_row(x):
    last = x[:1]
    for row in range(2):
        if (x[row] > 0).any():
            last = x[row : row + 1]
    return x + last


def one_in_another(x):
    y, z = x * 2, x * 3
    if (x > 0).any():
        y = y + 1
        if (x > 1).any().item():
            y, z = y * 2, z + 1
        z = z - y
    return y - z


def casts(x):
    y = x * 2
    if (x > 1).sum().item():
        y = y.double().masked_fill(x > 1, 7.0).type_as(y)
    return y + x


def fills(x):
    """A mask that is empty where the branch is not taken: nothing has to be selected."""
    y = x * 2
    if (x > 1).any():
        y = y.masked_fill(x > 0, 7.0)
        y.masked_fill_(mask=x < -2, value=5.0)
    return y + x


def either(x):
    """Overflow, as models look for it in 16 bits. Of three conditions the second and third are computed always."""
    y = x * 2
    if y.isnan().any() or (y > 3).any() or (y < -5).any():
        y = y.clamp(-1, 1)
    return y


def either_or_a_flag(x, wanted=False):
    y = x * 2
    if (y > 3).any() or wanted:
        y = y + 1
    if (y > 30).any() or not wanted:
        y = y * 3
    return y


def neither(x):
    y = x * 2
    if not ((y > 3).any() or (y < -5).any()):
        y = y + 1
    return y


def either_in_another(x):
    y = x * 2
    if (x > 0).any() and ((y > 3).any() or (y.abs() < 1).any()):
        y = y + 1
    return y


@pytest.mark.parametrize(
    "program",
    [adds_one, takes_another_row, one_in_another, casts, fills, either, either_or_a_flag, neither, either_in_another],
)
def test_both_ways_are_in_one_graph(program, caplog):
    graphs, said = traced(program, X, caplog)
    assert len(graphs) == 1 and "keeps a graph break" not in said
    selects = [node.target for node in graphs[0].graph.nodes].count(torch.where)
    several = {takes_another_row: 2, one_in_another: 4, fills: 0, neither: 2, either_in_another: 2}
    assert selects == several.get(program, 1)


# ---- what is left to a graph break -----------------------------------------------------------------------------------
def multiplies(x):
    y = x * 2
    if (x > 1).any():
        y = y @ y
    return y + x


def picks(x):
    y, place = x * 2, (x > 0).sum(1)  # 2 is no row
    if (place < 2).all():
        y = y[place]
    return y + x


def swaps(x):
    y, z = torch.zeros_like(x), torch.ones_like(x)
    if (x > 1).any():
        y, z = z + 1, y
    return y - 2 * z


def of_another_dtype(x):
    y = x * 2
    if (x > 1).any():
        y = y.double()
    return (y + x).float()


def is_written_later(x):
    y = x * 2
    z = y.view(-1)
    if (x > 1).any():
        y = y + 1
    y.mul_(2)
    return y.sum() + z


def is_filled_and_written_later(x):
    y = x * 2
    z = y.view(-1)
    if (x > 1).any():
        y = y.masked_fill(x > 0, 7.0)
    y.mul_(2)
    return y.sum() + z


def writes_to_one_from_before(x):
    y, z = x * 2, x * 3
    if (x > 1).any():
        z.masked_fill_(x > 0, 7.0)
        y = z / x
    return y + z


def gives_back_its_input(x):
    if (x > 1).any():
        x = x + 1
    return x


def was_a_number(x):
    y = 1.0
    if (x > 1).any():
        y = x.sum()
    return x * y


def was_nothing(x):
    y = None
    if (x > 1).any():
        y = x + 1
    return x if y is None else y * 2


@pytest.mark.parametrize(
    "program, why",
    [
        (multiplies, "has a name stand for another tensor after it, and calls matmul"),
        (picks, "has a name stand for another tensor after it, and calls getitem"),
        (swaps, "has a name stand for another tensor after it"),
        (of_another_dtype, "of another shape, dtype or order of dims"),
        (is_written_later, "which is written later"),
        (is_filled_and_written_later, "which is written later"),
        (writes_to_one_from_before, "and writes to one from before it"),
        (was_a_number, "has a name stand for another tensor after it"),
        (was_nothing, "has a name stand for another tensor after it"),
        (gives_back_its_input, "which is returned and may be an input"),
    ],
)
def test_what_cannot_be_selected_breaks_the_graph_as_ever(program, why, caplog):
    _, said = traced(program, X, caplog)
    assert why in said


# ---- on ranks --------------------------------------------------------------------------------------------------------
class Masked(torch.nn.Module):
    """Attention whose mask is looked at first, as in fairseq and Transformer-XL. `scale` has no gradient where no token
    is masked, and the quotient by 0 none that is NaN."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.ones(()))

    def forward(self, x, mask):
        q = self.layer(x)
        masked = mask.any()
        if masked:
            q = q * self.scale / mask.sum()
        scores = q @ x.mT
        if masked.item():
            scores = scores.float().masked_fill(mask[:, None], -float("inf")).type_as(scores)
        return F.softmax(scores, -1) @ x


def batch(tokens, masked):
    x = torch.randn(2, tokens, 8, generator=torch.Generator().manual_seed(tokens))
    return {"x": x, "mask": torch.arange(tokens) >= torch.tensor([[tokens], [tokens - masked]])}


def on_rank():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, before = Masked(), len(ringopt.reports())
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    wrong = []
    for tokens, masked in ((12, 3), (12, 0), (17, 5), (17, 0)):
        given = batch(tokens, masked)
        wrong.append(difference(run(compiled, model, given), run(model, model, given)))
    return wrong, [(len(report.sites), report.sharded_fraction) for report in ringopt.reports()[before:]]


@pytest.mark.parametrize("p", [2, 3])
def test_attention_whose_mask_is_looked_at_first_is_one_graph(ranks, p):
    for errors, graphs in ranks(p, on_rank):
        assert all(error < 1e-5 for error in errors)  # NaN is not
        assert graphs == [(1, 1.0), (1, 1.0)]

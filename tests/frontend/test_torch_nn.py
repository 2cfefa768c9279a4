"""torch's own Transformer is one graph in whatever masks it is given, and its attention is found: as Dynamo traces it
by itself, it breaks inside torch.nn and runs the layers as they are, where no backend sees them."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn

import ringopt.backend  # noqa: F401  (teaches Dynamo)
from tests.harness.translation import validate

WIDTH, HEADS, ROWS = 8, 2, 13


class Encoder(nn.Module):
    """A mask made as the tutorials make it, of floats, and padding of bools."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, x, padding=None):
        hidden = torch.triu(torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype), diagonal=1)
        return self.layers(x, hidden, src_key_padding_mask=padding)


class EncoderAndDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(WIDTH, HEADS, 1, 1, WIDTH, dropout=0.0, batch_first=True)

    def forward(self, x, padding=None):
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        masks = dict(src_key_padding_mask=padding, tgt_key_padding_mask=padding, memory_key_padding_mask=padding)
        return self.both(x, x.flip(1), tgt_mask=causal, **masks)


def batch():
    padding = torch.arange(ROWS)[None] >= torch.tensor([[ROWS - 4], [ROWS]])
    return torch.randn(2, ROWS, WIDTH, dtype=torch.float64, requires_grad=True), padding


@pytest.mark.sample(2)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "make, p, patterns",
    [
        (Encoder, 2, ["causal & padding(padding)"] * 2),
        (EncoderAndDecoder, 3, ["causal & padding(padding)", "padding(padding)", "padding(padding)"]),
    ],
)
def test_masks_of_two_types(make, p, patterns, training):
    torch.manual_seed(0)
    verdict = validate(p, make().double().train(training), *batch())
    assert not verdict.wrong
    assert [site.pattern for site in verdict.report.sites] == patterns
    assert verdict.report.sharded_fraction == 1 and not verdict.report.refusal


def test_a_mask_that_is_passed_in():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, dropout=0.0, batch_first=True)
    near = (torch.arange(ROWS)[:, None] - torch.arange(ROWS)).abs() > 3
    verdict = validate(2, nn.TransformerEncoder(layer, 1).double(), batch()[0], near)
    assert not verdict.wrong
    assert [site.refusal for site in verdict.report.sites] == [None]


def test_a_mask_of_numbers_is_an_error_as_ever():
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double()
    x, padding = batch()
    with pytest.raises(Exception, match="only bool and floating types of key_padding_mask are supported"):
        torch.compile(attention, backend="eager")(x, x, x, key_padding_mask=padding.long())


def test_masks_of_two_types_are_warned_of_as_ever():
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double()
    x, padding = batch()
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="mismatched key_padding_mask and attn_mask is deprecated"):
        compiled = torch.compile(attention, backend="eager", fullgraph=True)
        compiled(x, x, x, key_padding_mask=padding, attn_mask=torch.zeros(ROWS, ROWS, dtype=x.dtype))

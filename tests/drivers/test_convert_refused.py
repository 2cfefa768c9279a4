"""What `ringopt.convert` refuses, and what it says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, export

import ringopt
from ringopt.drivers.convert import convert_program
from ringopt.errors import OptionError, ProgramError, RefusedError
from tests.harness.converting import Mixer, exported, rows


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


def test_nothing_to_shard_is_refused_unless_allowed() -> None:
    program = export(Plain(), (rows(),))
    with pytest.raises(ProgramError, match="nothing of this program can be sharded: no attention was found"):
        ringopt.convert(program)
    assert ringopt.convert(program, allow_empty=True) is program


def test_a_converted_program_is_refused() -> None:
    with pytest.raises(ProgramError, match="the program is converted already: "):
        ringopt.convert(ringopt.convert(exported()))


class Flattened(Mixer):
    """A mask whose elements are counted by n * q + k: it is read with one number for n."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        n, places = x.shape[1], torch.arange(x.shape[1])
        seen = (places[:, None] >= places).flatten().view(n, n)
        return self.out(F.scaled_dot_product_attention(q, k, v, seen).squeeze(1))  # type: ignore[no-any-return]


def test_an_open_size_that_is_fixed_is_refused() -> None:
    program = export(Flattened(), (rows(),), dynamic_shapes=({1: Dim("n", min=4, max=64)},))
    with pytest.raises(ProgramError, match=r"an open size is fixed where a mask .* \(s\d+ is 16\); export the program"):
        ringopt.convert(program)


class Counted(Mixer):
    """Some of its rows are picked by what is in them."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + (x[..., 0] > 0).nonzero().sum()


def test_a_size_that_data_make_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"u0 cannot be read from the sizes .* depends on data, .*with plain Dims"):
        ringopt.convert(export(Counted(), (rows(),)))


def test_options_of_one_run_and_unknown_ones_are_refused() -> None:
    with pytest.raises(OptionError, match="unknown option 'laout'"):
        ringopt.convert(exported(), {"laout": "zigzag"})


def test_a_refused_site_is_an_error_where_that_is_asked_for() -> None:
    class Short(Mixer):
        def forward(self, x: Tensor) -> Tensor:
            first = x[:, :1].unsqueeze(1)
            return super().forward(x) + F.scaled_dot_product_attention(first, first, first).squeeze(1)

    assert sum(site.refusal is None for site in convert_program(exported(Short()))[1].sites) == 1
    with pytest.raises(RefusedError, match=r"not sharded: .*1 rows for 2 ranks"):
        ringopt.convert(exported(Short()), {"on_refusal": "error"})


def test_a_program_whose_text_depends_on_the_ranks_is_refused() -> None:
    """Four rows are enough for zigzag on 2 ranks, and not on 3."""
    with pytest.raises(ProgramError, match="the sharded program depends on the number of ranks, so one file cannot"):
        ringopt.convert(exported(n=4))
    ringopt.convert(exported(n=4), {"layout": "contiguous"})


def test_random_numbers_of_replicated_values_by_the_stream_of_torch_are_refused() -> None:
    class Before(Mixer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + F.dropout(self.out.weight, 0.5, self.training).sum()

    with pytest.raises(ProgramError, match="draw random numbers that must be the same on every rank"):
        ringopt.convert(exported(Before()), {"random": "torch"})
    ringopt.convert(exported(Before().eval()), {"random": "torch"})
    ringopt.convert(exported(Before()))

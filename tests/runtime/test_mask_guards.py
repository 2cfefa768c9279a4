"""A mask kept as a buffer becomes a pattern; when the buffer changes, so does what is computed."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn as nn

import ringopt
from ringopt.runtime import mask_guards
from ringopt.runtime.mask_guards import numbers
from tests.harness.errors import worst_of

ROWS = 12


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("kept", torch.ones(ROWS, ROWS).tril())

    def forward(self, q, k, v):
        return (q @ k.mT).masked_fill(self.kept == 0, -math.inf).softmax(-1) @ v


def given():
    return [torch.randn(2, 3, ROWS, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def compiled(model):
    torch._dynamo.reset()
    made = len(ringopt.reports())
    run = torch.compile(model, backend="ring", options={"inner_backend": "eager"})
    return run, lambda: [report.sites[0].pattern for report in ringopt.reports()[made:]]


def windowed():
    return torch.ones(ROWS, ROWS).tril().triu(-3)


def test_the_buffer_is_read_once():
    model = Masked()
    run, patterns = compiled(model)
    for _ in range(2):
        torch.testing.assert_close(run(*given()), model(*given()))
    assert patterns() == ["causal"]


@pytest.mark.parametrize(
    "write",
    [
        lambda model: model.kept.copy_(windowed()),
        lambda model: model.load_state_dict({"kept": windowed()}),
        lambda model: setattr(model, "kept", windowed()),
        lambda model: setattr(model.kept, "data", windowed()),
        lambda model: model.kept.data.copy_(windowed()),
        lambda model: model.kept.numpy().__setitem__(..., windowed().numpy()),
    ],
    ids=["in place", "by load_state_dict", "another tensor", "another data", "in place of data", "by numpy"],
)
def test_a_change_is_noticed(write):
    model = Masked()
    run, patterns = compiled(model)
    run(*given())
    write(model)
    torch.testing.assert_close(run(*given()), model(*given()))
    assert patterns() == ["causal", "window(4)"]


def at_batches():
    """Errors of calls of several batch sizes, which one graph serves, before and after the mask changes; how often it
    was compiled anew."""
    model, errors = Masked(), []
    run, patterns = compiled(model)
    for mask in (torch.ones(ROWS, ROWS).tril(), windowed()):
        model.kept.copy_(mask)
        for batch in (2, 5, 3, 5, 4):
            qkv = [torch.randn(batch, 3, ROWS, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
            errors.append(float((run(*qkv) - model(*qkv)).abs().max()))
    return worst_of(*errors), patterns()


@pytest.mark.zoo
def test_what_is_compiled_anew_serves_its_own_sizes(ranks):
    """No guard can be added any more, so a graph made anew is one for the sizes of its inputs."""
    for error, patterns in ranks(2, at_batches):
        assert error < 1e-5 and patterns == ["causal"] * 2 + ["window(4)"] * 5


def test_a_silent_write_is_noticed_in_a_transposed_buffer():
    model = Masked()
    model.kept = torch.ones(ROWS, ROWS).triu().T
    run, patterns = compiled(model)
    run(*given())
    model.kept.data.copy_(windowed())
    torch.testing.assert_close(run(*given()), model(*given()))
    assert patterns() == ["causal", "window(4)"]


def on_ranks():
    model = Masked()
    run, patterns = compiled(model)
    run(*given())
    model.kept.copy_(windowed())
    return float((run(*given()) - model(*given())).abs().max()), patterns()


def test_a_change_is_noticed_on_every_rank(ranks):
    for error, patterns in ranks(2, on_ranks):
        assert error < 1e-6 and patterns == ["causal", "window(4)"]


def test_writing_the_same_numbers_changes_nothing(monkeypatch):
    """The numbers are read after the write, and at no later call."""
    model, read = Masked(), []
    run, patterns = compiled(model)
    run(*given())
    model.kept.mul_(1)
    monkeypatch.setattr(mask_guards, "numbers", lambda value: read.append(value) or numbers(value))
    for _ in range(3):
        torch.testing.assert_close(run(*given()), model(*given()))
    assert patterns() == ["causal"] and len(read) == 1


def test_in_inference_mode():
    """Tensors do not count their writes there."""
    with torch.inference_mode():
        model = Masked()
        run, patterns = compiled(model)
        run(*given())
        model.kept.copy_(windowed())
        torch.testing.assert_close(run(*given()), model(*given()))
    assert patterns() == ["causal", "window(4)"]


def test_a_mask_that_the_caller_passes_is_no_part_of_the_program():
    class Given(nn.Module):
        def forward(self, q, k, v, kept):
            return (q @ k.mT).masked_fill(kept == 0, -math.inf).softmax(-1) @ v

    model = Given()
    run, patterns = compiled(model)
    for kept in (torch.ones(ROWS, ROWS).tril(), windowed()):
        torch.testing.assert_close(run(*given(), kept), model(*given(), kept))
    assert patterns() == ["stored"]

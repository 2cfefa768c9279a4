"""Writes in place leave a program sharded: values, gradients and what was written are those of eager, on 2 and 3 ranks,
over several lengths in one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.harness.lengths import run_over

WIDTH, HEADS = 16, 4


class Model(nn.Module):
    """Attention whose query goes through `on_query`, or a `step(self, x)` of its own."""

    def __init__(self, on_query=None, step=None):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.side = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.on_query, self.step = on_query, step
        self.double()

    def attention(self, x, mask=None):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q = self.on_query(q) if self.on_query else q
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        return self.step(self, x) if self.step else self.attention(x)


def rows(n):
    return torch.randn(2, n, WIDTH, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


LENGTHS = (12, 17, 14)


def assert_sharded(model, p, share=1.0, graphs=2):
    reports = run_over(model, [(rows(n),) for n in LENGTHS], p).reports
    assert len(reports) == graphs  # the second length is the last to be compiled
    assert [report.refusal for report in reports] == [None] * graphs
    assert [site.refusal for report in reports for site in report.sites] == [None] * graphs
    assert all(report.sharded_fraction >= share for report in reports)


def written(same):
    """The query through each of `same`, which returns its operand itself or a view of it, and then written to."""

    def on_query(q):
        q = q * 1
        for k, each in enumerate(same):
            each(q).mul_(0.9 + 0.02 * k)
        return q

    return on_query


VIEWS = [
    lambda q: q.type_as(q.new_zeros(1)),
    lambda q: q.transpose(1, 2).type_as(q).transpose(1, 2),
    lambda q: q.to(torch.float64),
    lambda q: q.expand(q.shape),
    lambda q: q.expand_as(q),
    lambda q: q.broadcast_to(q.shape),
    lambda q: q.positive(),
    lambda q: q.resolve_conj(),
    lambda q: q.sum_to_size(q.shape),
    lambda q: torch.atleast_3d(q[:, :, 1:]),
    lambda q: q.real,
    lambda q: q.reshape_as(q.flatten(0, 1)),
    lambda q: q.mH,
    lambda q: q[0].adjoint(),
    lambda q: F.dropout(q, 0.5, False),
    lambda q: F.dropout(q, 0.0),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("p, same", [(2, VIEWS[:1]), (2, VIEWS[1:9]), (3, VIEWS[9:])])
def test_writes_through_what_was_handed_back(p, same):
    assert_sharded(Model(written(same)), p)


def clamped_first(m, x):
    m.side.weight.data.clamp_(-0.1, 0.1)
    with torch.no_grad():
        m.out.weight[0].mul_(0.9)
    return m.attention(x) + m.side(x).sum(-1, keepdim=True)


def test_weights_written_before_they_are_read_leave_a_graph_sharded():
    assert_sharded(Model(step=clamped_first), 2)


def learned_positions(m, x):
    """As a table of positions without a gradient to which a learned part is added."""
    positions = torch.linspace(0.0, 1.0, 32, dtype=x.dtype)[torch.arange(x.shape[1])].view(1, -1, 1).detach()
    positions = positions.expand(x.shape[0], -1, WIDTH).contiguous().detach()
    positions += m.out(x)
    return m.attention(x + positions)


def part_of_what_was_cut(m, x):
    y = m.side(x).mul(2).detach()
    y[:, 1:].add_(m.out(x)[:, :-1, :3])
    again = y.detach()
    y.view(-1).copy_(m.out(x)[..., :3].reshape(-1) + y.reshape(-1))
    return m.attention(x) + (y * again).sum(-1, keepdim=True)


@pytest.mark.parametrize("p, step", [(2, learned_positions), (3, part_of_what_was_cut)])
def test_what_nothing_else_reads_may_be_written_behind_a_detach(p, step):
    assert_sharded(Model(step=step), p)


def read_beside(m, x):
    y = m.side(x)
    cut = y.detach()
    cut += m.out(x)[..., :3]
    return m.attention(x) + y.sum(-1, keepdim=True)


def read_in_another_part(m, x):
    y = m.side(x).detach() * 2
    cut = y.chunk(2, 1)[0].detach()
    cut += m.out(x)[:, : cut.shape[1], :3]
    return m.attention(x) + y.sum() * cut.sum()


def clamped(m, x):
    y = m.attention(x) + m.side(x).sum(-1, keepdim=True)
    m.side.weight.data.clamp_(-0.1, 0.1)
    return y


def replaced(m, x):
    m.side.weight.data = m.side.weight.data * 0.5
    return m.attention(x) + m.side(x).sum(-1, keepdim=True)


def clamped_in_no_grad(m, x):
    y = m.side(x).sum(-1, keepdim=True)
    with torch.no_grad():
        y.clamp_(-0.1, 0.1)
    return m.attention(x) + y


THROUGH_DETACH = "writes through detach to a value with a gradient"


@pytest.mark.parametrize(
    "step, why, line",
    [
        (clamped, THROUGH_DETACH, "m.side.weight.data.clamp_(-0.1, 0.1)"),
        (read_beside, THROUGH_DETACH, "cut += m.out(x)[..., :3]"),
        (read_in_another_part, THROUGH_DETACH, "cut += m.out(x)[:, : cut.shape[1], :3]"),
        (replaced, "gives a tensor the memory of another one", "m.side.weight.data = m.side.weight.data * 0.5"),
        (clamped_in_no_grad, "writes under no_grad to a value with a gradient", "y.clamp_(-0.1, 0.1)"),
    ],
)
def test_a_write_that_autograd_does_not_see_is_refused_with_its_line(step, why, line):
    (report,) = run_over(Model(step=step), [(rows(12),)], 2).reports
    assert f"{why} (test_writes.py:" in report.refusal and line in report.refusal


def own_memory_in_no_grad(m, x):
    x = x.detach() * 1
    with torch.no_grad():
        x.set_(x)


def own_memory_as_data(m, x):
    m.side.weight.data = m.side.weight.data.contiguous().to(torch.float64)


def own_memory_of_a_value(m, x):
    x = x.detach() * 1
    x.set_(x.view(2, -1, WIDTH))


@pytest.mark.parametrize("set_again", [own_memory_in_no_grad, own_memory_as_data, own_memory_of_a_value])
def test_a_tensor_that_is_given_its_own_memory_stays_as_it_is(set_again):
    def step(m, x):
        y = m.side(x)
        set_again(m, x)
        return m.attention(x) + (y + m.side(x)).sum(-1, keepdim=True)

    assert_sharded(Model(step=step), 2)


ENDS = pytest.mark.skipif(torch.__version__ >= "2.15", reason="there Dynamo ends the graph")


@pytest.mark.parametrize(
    "other", [lambda w: w.t().contiguous().t(), pytest.param(lambda w: w[1:], marks=ENDS), lambda w: w * 1]
)
def test_other_elements_of_it_or_other_memory_are_refused(other):
    def step(m, x):
        m.side.weight.data = other(m.side.weight.data)
        return m.attention(x) + m.side.weight.sum()

    (report,) = run_over(Model(step=step), [(rows(12),)], 2).reports
    assert "gives a tensor the memory of another one (test_writes.py:" in report.refusal


def in_place_logic(m, x):
    n = x.shape[1]
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    mask &= torch.arange(n)[:, None] - torch.arange(n) < 9
    mask |= torch.eye(n, dtype=torch.bool)
    mask ^= torch.zeros(n, n, dtype=torch.bool)
    return m.attention(x, mask)


def in_place_shifts(m, x):
    places = torch.arange(x.shape[1]) * 1
    places <<= 2
    places >>= torch.ones_like(places)
    places |= 1
    places ^= 2
    places &= 62
    return m.attention(x + places[:, None])


def filled_diagonal(m, x):
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(-1)
    return m.attention(x, mask.fill_diagonal_(True))


@pytest.mark.sample(6)
@pytest.mark.parametrize("p", (2, 3))
@pytest.mark.parametrize("step", (in_place_logic, in_place_shifts, filled_diagonal), ids=lambda f: f.__name__)
def test_integers_and_masks_written_in_place(step, p):
    # Of fill_diagonal_, torch itself fixes the size.
    assert_sharded(Model(step=step), p, graphs=3 if step is filled_diagonal else 2)


def low_frequencies(q):
    """As in a Fourier neural operator: some frequencies are made, one by one and all at once; the rest is zero."""
    spectrum = torch.fft.rfft(q, dim=-1)
    kept = torch.zeros_like(spectrum)
    kept.select(-1, 0).copy_(spectrum[..., 1].conj() * (1 + 2j))
    kept[..., -2:] = spectrum[..., :2] * 1j
    kept[..., 1:].mul_(2 - 1j)
    return torch.fft.irfft(kept, n=q.shape[-1], dim=-1)


def halves_of_complex(q):
    spectrum = torch.fft.rfft(q, dim=-1)
    spectrum.real[..., 1:] = q[..., 2:]
    spectrum.imag.mul_(2)
    return torch.fft.irfft(spectrum, n=q.shape[-1], dim=-1)


def pairs_and_numbers(q):
    """Rotations in place: complex numbers in the memory of real ones, and real ones in that of complex ones."""
    q = q * 1
    numbers = torch.view_as_complex(q.unflatten(-1, (-1, 2)))
    numbers[..., 1] *= torch.polar(torch.ones(q.shape[2]), torch.arange(q.shape[2]) / 9).to(numbers)
    torch.view_as_real(numbers)[..., 0].mul_(3)
    return q


def conjugated(q):
    spectrum = torch.fft.rfft(q, dim=-1)
    spectrum.conj()[..., 1:] *= 2 + 1j
    return torch.fft.irfft(spectrum, n=q.shape[-1], dim=-1)


@pytest.mark.sample(4)
@pytest.mark.parametrize("p", (2, 3))
@pytest.mark.parametrize(
    "on_query", (low_frequencies, halves_of_complex, pairs_and_numbers, conjugated), ids=lambda f: f.__name__
)
def test_parts_of_complex_numbers_are_written(on_query, p):
    # Of a view that is conjugated, torch itself fixes the size.
    assert_sharded(Model(on_query), p, graphs=3 if on_query is conjugated else 2)


OPTIMIZERS = {"momentum": partial(torch.optim.SGD, momentum=0.9), "adam": torch.optim.AdamW, "nadam": torch.optim.NAdam}


def optimized(name, **compiled):
    """A weight and the states of its optimizer after compiled steps, which Dynamo's graph holds."""
    torch._dynamo.reset()
    draw = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 4, generator=draw, dtype=torch.float64))
    optimizer = OPTIMIZERS[name]([weight], 0.1)
    step = torch.compile(optimizer.step, **compiled)
    for _ in range(3):
        weight.grad = torch.randn(3, 4, generator=draw, dtype=torch.float64)
        step()
    return [weight.detach(), *optimizer.state[weight].values()]


def optimized_on_rank(name):
    return optimized(name, backend="ring", options={"inner_backend": "aot_eager"})


@pytest.mark.parametrize("name, p", [("momentum", 1), ("adam", 2), pytest.param("nadam", 1, marks=pytest.mark.zoo)])
def test_a_step_of_an_optimizer_is_taken_when_its_graph_runs(ranks, name, p):
    """And not once more while it is compiled."""
    for found in ranks(p, optimized_on_rank, name):
        torch.testing.assert_close(found, optimized(name, backend="aot_eager"), rtol=0, atol=0)


def counted(on_ring):
    """A mask and a scale by tensors that Dynamo's graph holds, which are written within it and between calls."""
    torch._dynamo.reset()
    steps, scale = torch.zeros((), dtype=torch.long), torch.ones((), dtype=torch.float64)
    for held in (steps, scale):
        torch._dynamo.mark_static_address(held, guard=True)

    def step(x):
        places = torch.arange(x.shape[1])
        seen = (places[:, None] - places).abs() <= 2 + steps
        y = F.scaled_dot_product_attention(x * scale, x, x, attn_mask=seen)
        steps.add_(1)
        return y

    run, found = torch.compile(step, backend="ring", options={"inner_backend": "aot_eager"}) if on_ring else step, []
    for n in (16, 16, 13, 16):
        found += [run(torch.arange(2.0 * n * 8, dtype=torch.float64).reshape(2, n, 8).sin()), steps.clone()]
        scale.mul_(2)
    return found


def counted_on_rank():
    return counted(on_ring=True)


def test_tensors_that_a_graph_holds_change_from_call_to_call(ranks):
    for found in ranks(2, counted_on_rank):
        torch.testing.assert_close(found, counted(on_ring=False), rtol=1e-12, atol=1e-12)

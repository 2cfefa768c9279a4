"""The kernels of attention: arguments, results, and on the CPU the numbers."""

from __future__ import annotations

import pytest
import torch

from ringopt.torch_compat import sdpa
from ringopt.torch_compat.schema import schema_of

# By operator, its arguments in order, and how many results are taken. "*" parts what is given by name.
FORWARDS = {
    sdpa.flash_cpu: ("query key value dropout_p is_causal * attn_mask scale", 2),
    sdpa.flash: ("query key value dropout_p is_causal return_debug_mask * scale", 2),
    sdpa.flash_band: (
        "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask * scale "
        "window_size_left window_size_right",
        2,
    ),
    sdpa.efficient: ("query key value attn_bias compute_log_sumexp dropout_p is_causal * scale", 2),
    sdpa.cudnn: ("query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask * scale", 2),
}
BACKWARDS = {
    sdpa.flash_cpu_backward: ("grad_out query key value out logsumexp dropout_p is_causal * attn_mask scale", 3),
    sdpa.flash_backward: (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed "
        "philox_offset * scale",
        3,
    ),
    sdpa.flash_band_backward: (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal rng_state unused "
        "* scale window_size_left window_size_right",
        3,
    ),
    sdpa.efficient_backward: (
        "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p grad_input_mask "
        "is_causal * scale",
        3,
    ),
    sdpa.cudnn_backward: (
        "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q max_k "
        "dropout_p is_causal * scale",
        3,
    ),
}


@pytest.mark.parametrize("kernel", [*FORWARDS, *BACKWARDS], ids=str)
def test_arguments_come_in_this_order(kernel: torch._ops.OpOverloadPacket) -> None:
    names, results = (FORWARDS | BACKWARDS)[kernel]
    arguments = schema_of(kernel.default).arguments
    by_place = [arg.name for arg in arguments if not arg.kwarg_only]
    by_name = [arg.name for arg in arguments if arg.kwarg_only]
    given = names.partition("* ")[2].split()
    assert by_name == given or kernel is sdpa.flash_band  # which has more, by release
    assert " ".join([*by_place, "*", *by_name[: len(given)]]) == names
    assert len(schema_of(kernel.default).returns) >= results


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_cpu_kernel_gives_natural_log_sum_exps_and_gradients(causal: bool, masked: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.randn(1, 1, 6, 6, dtype=torch.float64) if masked and not causal else None
    out, lse = sdpa.flash_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=0.3)
    scores = q @ k.transpose(-1, -2) * 0.3 + (mask if mask is not None else 0)
    if causal:
        scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(scores.softmax(-1) @ v, (q, k, v), dout)
    plain = (x.detach() for x in (dout, q, k, v, out, lse))
    found = sdpa.flash_cpu_backward(*plain, 0.0, causal, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(tuple(found), wanted)

"""Block tables of flex_attention against their mask_mod, all blocks of small masks."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from ringopt.frontend.flex_block_masks import agree, seen_blocks

SIZES, BLOCK = (2, 3, 11, 14), (4, 5)
BLOCKS = (3, 3)

MASKS = {
    "all": lambda b, h, q, k: q >= 0,
    "none": lambda b, h, q, k: q < 0,
    "causal": lambda b, h, q, k: q >= k,
    "by batch and head": lambda b, h, q, k: (q - k).abs() < 2 + 3 * b + h,
}


def over_all(mod):
    return lambda b, h, q, k: mod(b[:, None, None, None], h[:, None, None], q[:, None], k).expand(
        len(b), len(h), len(q), len(k)
    )


def tables_of(mod, separate):
    choice = {"separate_full_blocks": separate}
    if "separate_full_blocks" not in inspect.signature(create_block_mask).parameters:  # torch 2.11
        if not separate:
            pytest.skip("this torch always lists full blocks by themselves")
        choice = {}
    made = create_block_mask(mod, *SIZES, device="cpu", BLOCK_SIZE=BLOCK, **choice)
    return list(made.as_tuple()[2:10])


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("separate", (True, False))
def test_what_torch_makes_agrees(name, separate):
    blocks = seen_blocks(tables_of(MASKS[name], separate), *BLOCKS)
    assert blocks is not None and agree(*blocks, over_all(MASKS[name]), SIZES, BLOCK)


@pytest.mark.parametrize("name", MASKS)
def test_every_block_left_out_or_called_whole_is_asked(name):
    """One block is moved to another kind at a time; true is only what the mask itself says."""
    mask = over_all(MASKS[name])
    partial, full = seen_blocks(tables_of(MASKS[name], True), *BLOCKS)
    places = (torch.arange(size) for size in SIZES)
    seen = mask(*places)
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(size) for size in (*SIZES[:2], *BLOCKS))).tolist():
        block = seen[b, h, i * 4 : i * 4 + 4, j * 5 : j * 5 + 5]
        true = {"absent": not block.any(), "partial": True, "full": bool(block.all())}
        for kind, holds in true.items():
            some, whole = partial.clone(), full.clone()
            some[b, h, i, j], whole[b, h, i, j] = kind == "partial", kind == "full"
            assert agree(some, whole, mask, SIZES, BLOCK) == holds


def test_tables_that_contradict_themselves():
    number, index, *rest = tables_of(MASKS["causal"], True)
    assert seen_blocks([number, index, number, index, None, None, None, None], *BLOCKS) is None  # partial and full
    assert seen_blocks([number - 1, index, *rest], *BLOCKS) is None  # other than those of the backward
    assert seen_blocks([number[:, :, :2], index[:, :, :2], *rest], *BLOCKS) is None  # too few queries

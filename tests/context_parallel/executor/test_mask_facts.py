"""What is known of the tensors that a mask reads: copied to the host where they are elsewhere, and found once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringopt.context_parallel.executor import mask_facts
from ringopt.context_parallel.executor.mask_facts import COPIED, MaskFacts
from ringopt.torch_compat.fake_tensors import FakeTensorMode


def test_what_is_on_the_host_is_read_where_it_is() -> None:
    """No copy is made, nor are the tensors held."""
    sources = [torch.ones(3), torch.empty(5, device="meta")]
    assert MaskFacts(sources).numbers(sources) is sources


@pytest.mark.parametrize(("size", "copied"), [(COPIED // 4, True), (COPIED // 4 + 1, False)])
def test_small_ones_of_a_device_are_copied(monkeypatch: pytest.MonkeyPatch, size: int, copied: bool) -> None:
    """All at once, when the facts are made; of larger ones each block is read where they are."""
    begun = list[list[Tensor]]()
    monkeypatch.setattr(mask_facts, "to_host", lambda given: begun.append(given) or (lambda: ["here"]))
    with FakeTensorMode():
        sources = [torch.empty(size, device="cuda")]
    facts = MaskFacts(sources)
    assert begun == ([sources] if copied else [])
    assert facts.numbers(sources) == (["here"] if copied else sources)


def test_a_question_is_answered_once() -> None:
    facts, answers = MaskFacts([]), iter((1, 2))
    assert [facts.once("which?", lambda: next(answers)) for _ in range(3)] == [1, 1, 1]

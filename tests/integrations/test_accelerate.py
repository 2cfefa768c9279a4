"""accelerate and the Trainer of transformers with `cp_size` ranks a sequence log what one process logs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="an extra: pip install 'ringopt[accelerate]'")

from ringopt.errors import OptionError
from ringopt.integrations.accelerate import ParallelismConfig
from tests.integrations.trainings import EAGER, LONG, Training, check_alike, check_ranks, looped, trained


def test_train_evaluate_predict_and_resume(ranks: Callable[..., list[Any]]) -> None:
    """Five samples in batches of two: the last one is not full, which a gather over all ranks would count twice."""
    case = Training(arguments={"gradient_accumulation_steps": 2}, resume=True, predict=True, options=EAGER)
    found, expected = check_ranks(ranks, trained, case)
    assert expected["eval"]["eval_samples"] == 5 and len(expected["resumed"]) == case.steps
    torch.testing.assert_close(found["predictions"], expected["predictions"], rtol=1e-4, atol=1e-5)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-5)


MORE = {
    "packed": Training(data="packed", arguments={"train_sampling_strategy": "sequential"}, steps=2, options=EAGER),
    "lengths": Training(arguments={"train_sampling_strategy": "group_by_length"}, steps=2, options=EAGER),
    "window": Training("gemma3", steps=2, options=EAGER),
    "hybrid": Training("qwen3_next", steps=2, options=EAGER),
    "latent": Training("deepseek_v3", steps=2, options=EAGER),
    "labels": Training("classifier", data="labelled", steps=2, options=EAGER),
    "inductor": Training(steps=2, options={}),
    "checkpointed": Training(
        arguments={"gradient_checkpointing": True}, steps=2, options={"inner_backend": "aot_eager"}
    ),
}


@pytest.mark.zoo
@pytest.mark.parametrize("name", MORE)
def test_data_and_models_of_other_kinds(ranks: Callable[..., list[Any]], name: str) -> None:
    check_ranks(ranks, trained, MORE[name])


@pytest.mark.zoo
def test_twelve_lengths_are_four_graphs(ranks: Callable[..., list[Any]]) -> None:
    """In training and in evaluation, one of the first length, and one that is open."""
    arguments = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 1}
    case = Training(data="twelve lengths", arguments=arguments, steps=12, options=EAGER)
    found, _ = check_ranks(ranks, trained, case)
    assert found["graphs"] <= 4


@pytest.mark.zoo
def test_a_trainer_beside_ddp(ranks: Callable[..., list[Any]]) -> None:
    """As under DDP alone: samples have unequal numbers of labels, and the Trainer fills the last batch up."""
    alone = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
    case = Training(arguments=alone, steps=2, predict=True, options=EAGER)
    expected, _ = ranks(2, trained, case, None, timeout=LONG)
    for found in ranks(4, trained, case, {"dp_replicate_size": 2, "cp_size": 2}, timeout=LONG):
        check_alike(found, expected)
        torch.testing.assert_close(found["predictions"], expected["predictions"], rtol=1e-4, atol=1e-5)
        assert found["sites"] and not found["refused"]


@pytest.mark.zoo
def test_mixed_precision(ranks: Callable[..., list[Any]]) -> None:
    case = Training(arguments={"bf16": True}, steps=2, options=EAGER)
    [expected] = ranks(1, trained, case, None, timeout=LONG)
    for found in ranks(2, trained, case, {"cp_size": 2}, timeout=LONG):
        check_alike(found, expected, tolerance=1e-2)


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("p", "mesh"),
    [(2, {}), (4, {"dp_replicate_size": 2}), (4, {"dp_shard_size": 2})],
    ids=["cp", "DDP beside it", "FSDP2 beside it"],
)
def test_accelerate_alone(ranks: Callable[..., list[Any]], p: int, mesh: dict[str, int]) -> None:
    found, expected = check_ranks(ranks, looped, Training(data="equal", options=EAGER), p, **mesh, cp_size=2)
    torch.testing.assert_close(found["per_sample"], expected["per_sample"], rtol=1e-4, atol=1e-5)
    assert len(found["objects"]) == p // 2


def test_what_libraries_see_of_it() -> None:
    """As with tensor parallelism, ranks have one batch and the whole loss."""
    config = ParallelismConfig(dp_replicate_size=2, cp_size=3)
    assert (config.ring_size, config.tp_size, config.cp_size, config.total_size) == (3, 3, 1, 6)
    assert not config.tp_enabled and not config.cp_enabled
    assert config.active_mesh_dims == ["dp_replicate", "cp"] and config._get_mesh() == (("dp_replicate", "cp"), (2, 3))
    assert "cp_size=3" in repr(config)


def test_one_rank_a_sequence_is_what_accelerate_makes_of_it() -> None:
    config = ParallelismConfig(tp_size=2)
    assert config.ring_size == 1 and config.tp_enabled and config.non_dp_dim_names == ["tp"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cp_size": 0}, "cp_size must be at least 1, but got 0"),
        ({"cp_size": 2, "tp_size": 2}, "cp_size=2 beside tp_size=2, sp_size=1"),
        ({"cp_size": 2, "options": {"strateg": "ring"}}, "unknown option 'strateg'"),
        ({"cp_size": 2, "options": {"mesh": None}}, "accelerate makes the mesh"),
        ({"cp_size": 2, "cp_handler": object()}, "pass options="),
    ],
)
def test_what_cannot_be_is_an_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, OptionError), match=message):
        ParallelismConfig(**given)


def test_too_few_processes() -> None:
    with pytest.raises(
        ValueError, match=r"is for 2 processes, and 1 run: launch as many \(torchrun --nproc-per-node 2"
    ):
        ParallelismConfig(cp_size=2).build_device_mesh("cpu")

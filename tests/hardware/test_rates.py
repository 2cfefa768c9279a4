"""Hardware from the table, measured profiles, and which of them all ranks go by."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from ringopt.distributed import agreed_rates
from ringopt.errors import OptionError
from ringopt.hardware import profile
from ringopt.hardware.devices import DEVICES, LINKS, limits_of
from ringopt.hardware.rates import Rates, Speed, cautious, rates_of
from tests.harness.threads import ThreadMesh

MEASURED = dataclasses.replace(
    cautious(), source="measured", speeds={"flash_cpu float32 forward full": Speed(7e10, 1e-4)}, overlap=0.5, memory=1
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_every_device_comes_with_a_link_of_the_table() -> None:
    assert {device.link for device in DEVICES.values()} <= set(LINKS)
    assert {device.network for device in DEVICES.values() if device.node} <= set(LINKS)
    assert rates_of("h100").default.rate == 0.75 * 989e12
    assert rates_of("h100", "float32").default.rate == 0.75 * 67e12
    assert rates_of("a100", link="infiniband-hdr").link.rate == 25e9


@pytest.mark.parametrize("names", [("h101", None), ("h100", "string")])
def test_what_is_not_in_the_table_is_refused(names: tuple[str, str | None]) -> None:
    with pytest.raises(OptionError, match="is unknown; the table has "):
        rates_of(names[0], link=names[1])


@pytest.mark.parametrize(
    ("product", "device", "link"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", "nvlink4"), ("NVIDIA A100-SXM4-40GB", "a100", "nvlink3"),
        ("NVIDIA A100 80GB PCIe", "a100", "pcie4"), ("NVIDIA H100 PCIe", "h100", "pcie5"),
        ("Tesla V100-SXM2-32GB", "v100", "nvlink2"), ("NVIDIA B200", "b200", "nvlink5"),
    ],
)  # fmt: skip
def test_a_gpu_without_a_profile_is_known_by_its_name(
    product: str, device: str, link: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: product)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(total_memory=77))
    found = profile.here("cuda")
    assert found.source.startswith(f"data sheet of {device}, {link}") and "not measured" in found.source
    assert (found.link.name, found.memory, found.part) == (link, 77, DEVICES[device].limits.part)
    assert found.tile("cudnn", "bfloat16", True, "causal").rate == DEVICES[device].flops("bfloat16")
    assert found.tile("efficient", "float32", False, "masked").rate == DEVICES[device].flops("float32")
    assert (found.between is None) == link.startswith("pcie")
    assert Rates.of_dict(found.to_dict()) == found, "rank 0 sends it to the others"
    profile.store(MEASURED, "cuda")
    assert profile.here("cuda") == MEASURED


def test_a_gpu_that_the_table_lacks_is_taken_for_slow(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(total_memory=77))
    assert profile.here("cuda") == cautious()


def test_limits_are_of_the_type_of_a_device() -> None:
    """Not of its name: the ranks of a mesh cut alike."""
    assert limits_of("cpu") is limits_of("meta") is DEVICES["cpu"].limits
    assert {device.limits for name, device in DEVICES.items() if name != "cpu"} == {limits_of("cuda")}


def test_a_step_takes_the_longer_of_compute_and_exchange() -> None:
    assert rates_of("h100").step_seconds(3.0, 2.0) == 3.0
    assert MEASURED.step_seconds(3.0, 2.0) == 4.0


def test_ranks_of_other_nodes_are_reached_over_another_link() -> None:
    """Of 8 ranks on 2 nodes of 4: every second is on nodes of 2, every fourth on one of its own."""
    rates = dataclasses.replace(MEASURED, node=4, between=LINKS["ethernet-10g"])
    assert [rates.crosses(0, rank) for rank in (3, 4)] == [False, True]
    assert [rates.tiers(ranks) for ranks in (4, 8)] == [False, True] and not MEASURED.tiers(8)
    assert rates.every(2).node == 2 and rates.every(2).link == MEASURED.link
    assert rates.every(4) == rates.every(3) == rates.beyond and rates.beyond.link.name == "ethernet-10g"
    assert rates_of("h100").node == 8 and rates_of("h100", link="nvlink4").between is None


def test_a_tile_of_another_dtype_or_shape_takes_the_nearest_that_was_measured() -> None:
    assert MEASURED.tile("flash_cpu", "bfloat16", False, "causal") == Speed(7e10, 1e-4)
    assert MEASURED.tile("flash_cpu", "float32", True, "full") == MEASURED.default
    assert Speed(2.0, 1.0).seconds(4.0) == 3.0 and Speed(2.0, 1.0, 0.5).seconds(4.0, 2) == 4.0


# ---- the profile -----------------------------------------------------------------------------------------------------


def test_a_profile_is_read_as_it_was_stored(cache: Path) -> None:
    assert profile.here() == cautious()
    path = profile.store(MEASURED)
    assert path.parent == cache / "ringopt" and [file.name for file in path.parent.iterdir()] == [path.name]
    over = dataclasses.replace(MEASURED, between=LINKS["ethernet-10g"])
    profile.store(over)
    assert profile.here() == over
    profile.store(MEASURED)
    assert profile.here() == MEASURED and profile.here().digest == MEASURED.digest != cautious().digest


@pytest.mark.parametrize("text", ["{", '{"format": 0}', '{"format": 1, "rates": {"speeds": {}}}'])
def test_a_profile_that_cannot_be_read_says_what_to_do(cache: Path, text: str) -> None:
    profile.store(MEASURED).write_text(text)
    with pytest.raises(OptionError, match=r"the profile .* cannot be read .*measure anew with `ringopt bench --calib"):
        profile.here()


# ---- on several ranks ------------------------------------------------------------------------------------------------


def agreed(*of_ranks: Rates | OptionError) -> list[Rates | str]:
    """What each rank goes by; an error as its text."""
    mesh = ThreadMesh(len(of_ranks), "rates")

    def here(_device: str) -> Rates:
        mine = of_ranks[mesh.rank]
        if isinstance(mine, OptionError):
            raise mine
        return mine

    def ask(mesh: ThreadMesh) -> Rates | str:
        try:
            assert agreed_rates.agreed_rates(mesh) is agreed_rates.agreed_rates(mesh)  # asked once
            return agreed_rates.agreed_rates(mesh)
        except OptionError as error:
            return str(error)

    with patch.object(agreed_rates, "here", here):
        return mesh.run(ask)


def test_equal_profiles_need_no_more_than_a_digest() -> None:
    assert agreed(MEASURED, MEASURED, MEASURED) == [MEASURED] * 3


def test_with_a_link_between_nodes_all_ask_which_are_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    over = dataclasses.replace(MEASURED, between=LINKS["ethernet-10g"])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert agreed(over, over, over, over) == [dataclasses.replace(over, node=2)] * 4
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert agreed(over, over) == [over.beyond] * 2


@pytest.mark.parametrize("ranks", [(MEASURED, cautious()), (cautious(), MEASURED, MEASURED)])
def test_where_profiles_differ_all_go_by_that_of_rank_0(ranks: tuple[Rates, ...]) -> None:
    found = agreed(*ranks)
    said = dataclasses.replace(ranks[0], source=f"{ranks[0].source} (of rank 0; other ranks have other rates)")
    assert found == [said] * len(ranks)


def test_a_profile_that_one_rank_cannot_read_is_an_error_on_all_or_on_none() -> None:
    broken = OptionError("the profile is broken")
    assert agreed(broken, MEASURED) == ["rank 0: the profile is broken"] * 2
    assert {rates.source for rates in agreed(MEASURED, broken) if isinstance(rates, Rates)} == {
        "measured (of rank 0; other ranks have other rates)"
    }

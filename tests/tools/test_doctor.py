"""`ringopt doctor`: it tells what is there, why something is not, and what is set; it sets nothing."""

from __future__ import annotations

import json
import os

import pytest
import torch

from ringopt.kernels.choose import KERNELS
from ringopt.tools import doctor
from ringopt.tools.cli import main
from ringopt.tools.common.command import WIDTH


def test_every_part_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_BLOCKING_WAIT", "1")
    before = dict(os.environ)
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert dict(os.environ) == before
    assert [line for line in said.splitlines() if not line.startswith(" ")] == [
        "versions", "devices", "kernels", "links", "rates", "settings", "obsolete",
    ]  # fmt: skip
    assert "GLOO_SOCKET_IFNAME: eth7 (set)" in said and "NCCL_P2P_DISABLE: unset: 0: GPUs" in said
    assert "NCCL_BLOCKING_WAIT: is set, and no longer read" in said.replace("\n", " ")
    assert max(map(len, said.splitlines())) <= WIDTH


def test_every_kernel_computes_something_or_says_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["kernels"]) == [kernel.name for kernel in KERNELS]
    assert all(found["kernels"].values())
    assert found["kernels"]["math"].startswith("computes float32 and bfloat16 on ")
    if not torch.cuda.is_available():
        assert "flash_cpu" in found["kernels"] and found["kernels"]["flash"].startswith("kernel flash ")
    assert found["rates"]["profile"].startswith("no profile: only work counts; `ringopt bench --calibrate`")


def test_nothing_obsolete_is_found_where_nothing_is() -> None:
    assert doctor.obsolete({"NCCL_DEBUG": "INFO"}) == {}
    assert doctor.settings({"NCCL_DEBUG": "INFO"})["NCCL_DEBUG"] == "INFO (set)"

"""What is decided on the host waits for its own copy, on the stream of its own device."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ringopt.hardware.to_host import to_host


def test_a_copy_is_waited_for_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the current one, which may be another."""
    waited: list[str] = []

    class Event:
        def record(self, stream: str) -> None:
            waited.append(f"recorded on {stream}")

        def synchronize(self) -> None:
            waited.append("synchronized")

    class Module:
        @staticmethod
        def current_stream(device: torch.device) -> str:
            return f"the stream of {device}"

    Module.Event = Event  # type: ignore[attr-defined]
    with FakeTensorMode():
        given = [torch.empty(3, device="cuda:2"), torch.empty(4, dtype=torch.bool, device="cuda:2")]
        monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
        read = to_host(given)
        assert waited == ["recorded on the stream of cuda:2"]
        found = read()
    assert waited[1:] == ["synchronized"] and [(x.device.type, x.numel()) for x in found] == [("cpu", 3), ("cpu", 4)]

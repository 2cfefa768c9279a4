"""Other limits of the CPU than its data sheet has, so that small attentions are cut as large ones are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringopt.hardware import devices


def set_limits(monkeypatch: pytest.MonkeyPatch, **changes: int) -> None:
    """`set_limits(monkeypatch, strip=8)`: those that are not named stay (ringopt.hardware.devices.Limits)."""
    monkeypatch.setattr(devices, "OF_CORES", replace(devices.OF_CORES, **changes))

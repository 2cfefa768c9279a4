"""Options from outside of the call: which one counts, what the report says, what is an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import ringopt
from ringopt.errors import OptionError
from ringopt.options import VARIABLE, Options, with_defaults


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(VARIABLE, raising=False)
    yield
    monkeypatch.delenv(VARIABLE, raising=False)
    assert with_defaults(None) == Options(), "a test left its defaults"


def test_the_call_counts_before_defaults_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, json.dumps({"strategy": "ring", "layout": "zigzag", "timeout": 5, "verify": True}))
    with ringopt.defaults(strategy="gather", timeout=6.0, layout="contiguous"), ringopt.defaults(timeout=7.0):
        found = with_defaults({"strategy": "ulysses"})
    assert (found.strategy, found.layout, found.timeout, found.verify) == ("ulysses", "contiguous", 7.0, True)
    assert found.outside == {
        "layout": "ringopt.defaults",
        "timeout": "ringopt.defaults",
        "verify": f"environment variable {VARIABLE}",
    }
    monkeypatch.delenv(VARIABLE)
    assert with_defaults({"strategy": "ulysses"}) == Options(strategy="ulysses")


def test_an_options_object_names_all() -> None:
    with ringopt.defaults(strategy="ring"):
        assert with_defaults(Options()).strategy == "auto"


def test_as_a_function_they_last_until_they_are_ended() -> None:
    outer = ringopt.defaults(outputs="lazy")
    inner = ringopt.defaults(outputs="local", verify=True)
    outer.end()
    assert (with_defaults(None).outputs, with_defaults(None).verify) == ("local", True)
    inner.end()
    inner.end()
    with pytest.raises(OptionError, match="have ended"), inner:
        pass


def test_what_cannot_be_is_an_error_and_changes_nothing() -> None:
    with pytest.raises(
        OptionError, match=r"unknown option 'strateg'; the options are mesh, .*; did you mean 'strategy'"
    ):
        ringopt.defaults(strateg="ring")
    with pytest.raises(OptionError, match="option outputs='whole': expected one of 'gather', 'lazy', 'local'"):
        ringopt.defaults(outputs="whole")
    with pytest.raises(OptionError, match="unknown option 'outside'"):
        ringopt.defaults(outside={})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{lazy}", r"RINGOPT_OPTIONS='{lazy}' is no JSON \(Expecting property name.*set it to a JSON object"),
        ('"lazy"', "is no JSON object: set it to"),
        ('{"strateg": "ring"}', "RINGOPT_OPTIONS: unknown option 'strateg'; the options are mesh, "),
        ('{"timeout": -1}', "RINGOPT_OPTIONS: option timeout=-1: expected a number of seconds"),
        ('{"mesh": "cp"}', r"names a mesh \('cp'\), which text cannot: call ringopt.defaults\(mesh=...\)"),
    ],
)
def test_the_environment_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(OptionError, match=message):
        with_defaults(None)


def test_options_that_do_not_fit_together_say_where_they_are_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, '{"segment_lengths": [8, 16], "dilation_rates": [1, 2]}')
    with pytest.raises(OptionError, match=r"2 lengths and 1 rates.*segment_lengths is from environment variable"):
        with_defaults({"dilation_rates": (1,)})


def attend(x: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.mark.parametrize("how", ["backend", "explain"])
def test_the_report_names_them(how: str) -> None:
    x = torch.randn(1, 2, 16, 8)
    torch._dynamo.reset()
    with ringopt.defaults(inner_backend="eager", strategy="ring"):
        if how == "explain":
            report: Any = ringopt.explain(attend, x, world_size=2)
        else:
            torch.compile(attend, backend="ring", options={"strategy": "gather"})(x)
            report = ringopt.reports()[-1]
    strategy = ", strategy='ring' (ringopt.defaults)" if how == "explain" else ""
    expected = f"options from outside of the call: inner_backend='eager' (ringopt.defaults){strategy}"
    assert expected in report.notes
    assert how == "backend" or report.sites[0].strategy == "ring"

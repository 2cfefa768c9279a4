"""Generated modules on real ranks: what they return, every gradient and the state are those of eager, call after call.

A failure prints the module; `draw(seed)` makes the same one again.
"""

from __future__ import annotations

import pytest
import torch

import ringopt
from ringopt.drivers import failing
from tests.generated.calls import apart
from tests.generated.modules import Written, draw, run

EAGER = {"inner_backend": "eager"}
WAYS = (
    EAGER,
    {**EAGER, "layout": "contiguous"},
    {**EAGER, "outputs": "lazy"},
    EAGER,
    {**EAGER, "shard": "attention"},
    {"inner_backend": "aot_eager"},
)


def verdict(program: Written, options: dict[str, str]) -> str:
    """exact, unsharded, fixed (to the sizes of a call, as a pass failed with open ones): right. Else what went wrong.
    On a rank."""
    torch._dynamo.reset()
    failing.RAISES = False
    model, again = program.module(), program.module()
    before = len(ringopt.reports())
    expected = run(model, program)
    with torch._dynamo.config.patch(recompile_limit=64):
        compiled = torch.compile(again, backend="ring", options={**options, "on_refusal": "ignore"})
        wrong = apart(expected, run(again, program, compiled))
    if wrong:
        return f"wrong: {wrong}"
    found = ringopt.reports()[before:]
    failed = [said for one in found for said in (one.refusal or "", *one.notes) if "failed" in said]
    if any(one.refusal in failed for one in found):
        return f"crash: {failed}"
    if failed:
        return "fixed"
    return "exact" if any(site.refusal is None for one in found for site in one.sites) else "unsharded"


def verdicts(first: int, count: int) -> list[tuple[int, str]]:
    """Of modules from seed `first` on, up to one that raises: behind it the ranks cannot go on."""
    found: list[tuple[int, str]] = []
    for seed in range(first, first + count):
        try:
            found.append((seed, verdict(draw(seed), WAYS[seed % len(WAYS)])))
        except Exception as error:  # any is what the test is for
            found.append((seed, f"crash: {type(error).__name__}: {error}"))
            break
    return found


def check(ranks, p: int, first: int, count: int) -> None:
    exact = 0
    for told in ranks(p, verdicts, first, count, timeout=200 + 30 * count):
        for seed, said in told:
            assert said in ("exact", "unsharded", "fixed"), f"seed {seed}: {said}\n{draw(seed)}"
            exact += said != "unsharded"
    assert exact > p * count // 2


@pytest.mark.parametrize("p, first, count", [(2, 0, 2), pytest.param(3, 501, 1, marks=pytest.mark.zoo)])
def test_modules_called_several_times(ranks, p, first, count):
    """A sample; with -m zoo five hundred."""
    check(ranks, p, first, count)


@pytest.mark.zoo
@pytest.mark.parametrize("first", range(0, 500, 25))
def test_five_hundred_modules(ranks, first):
    check(ranks, 2 + first // 250, first, 25)

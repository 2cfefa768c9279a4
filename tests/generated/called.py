"""What becomes of generated programs that are called several times on real ranks, beside eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import ringopt
from ringopt.drivers import failing
from tests.generated.calls import apart


@dataclass(frozen=True)
class Kind:
    """Of programs: `draw(seed)` makes one, `run(module, program, compiled)` calls it, `ways` are options by turns."""

    draw: Callable[[int], Any]
    run: Callable[..., Any]
    ways: Sequence[dict[str, str]]


def verdict(kind: Kind, program: Any, options: dict[str, str]) -> str:
    """exact, unsharded: right; fixed: so it is, though a pass failed while sizes were open. Else what went wrong. On a
    rank."""
    torch._dynamo.reset()
    failing.RAISES = False
    model, again = program.module(), program.module()
    before = len(ringopt.reports())
    expected = kind.run(model, program)
    # Dynamo's results of open sizes are each made twice to be kept, a tenth of the time, and seldom found again.
    with torch._dynamo.config.patch(recompile_limit=64, fake_tensor_cache_enabled=False):
        compiled = torch.compile(again, backend="ring", options={**options, "on_refusal": "ignore"})
        wrong = apart(expected, kind.run(again, program, compiled))
    if wrong:
        return f"wrong: {wrong}"
    found = ringopt.reports()[before:]
    failed = [said for one in found for said in (one.refusal or "", *one.notes) if "failed" in said]
    if any(one.refusal in failed for one in found):
        return f"crash: {failed}"
    if failed:
        return "fixed"
    return "exact" if any(site.refusal is None for one in found for site in one.sites) else "unsharded"


def verdicts(kind: Kind, first: int, count: int) -> list[tuple[int, str]]:
    """Of programs from seed `first` on, up to one that raises: behind it the ranks cannot go on."""
    found: list[tuple[int, str]] = []
    for seed in range(first, first + count):
        try:
            found.append((seed, verdict(kind, kind.draw(seed), kind.ways[seed % len(kind.ways)])))
        except Exception as error:  # any is what the test is for
            found.append((seed, f"crash: {type(error).__name__}: {error}"))
            break
    return found


def check(ranks: Any, kind: Kind, p: int, first: int, count: int) -> None:
    """All of them are right on p ranks, and most are sharded."""
    exact = 0
    for told in ranks(p, verdicts, kind, first, count, timeout=200 + 30 * count):
        for seed, said in told:
            assert said in ("exact", "unsharded", "fixed"), f"seed {seed}: {said}\n{kind.draw(seed)}"
            exact += said != "unsharded"
    assert exact > p * count // 2

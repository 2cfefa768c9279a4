"""Computation that overlaps with communication, and its description in the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.fx as fx

from ringopt.cost.choose import duration
from ringopt.hardware.rates import Rates
from ringopt.ir.nodes import module_path, op_name
from ringopt.ops.traits import is_recurrence, starts_back
from ringopt.overlap.in_flight import allowed
from ringopt.overlap.reorder import product_flops
from ringopt.report import bytes_text

SHOWN = 3  # names in a sentence


@dataclass(frozen=True)
class Meanwhile:
    """Computation that overlaps with an exchange: matrix `products` and the `seconds` that they take, the `cost` in
    seconds of a start and a finish, the bytes `held` in flight, and the `bound` of these."""

    products: Sequence[fx.Node]
    seconds: float
    cost: float
    held: int
    bound: int

    @classmethod
    def of(cls, products: Iterable[fx.Node], times: int, ranks: int, rates: Rates, held: int) -> Meanwhile:
        found = list(products)
        flops = times * sum(product_flops(node, ranks) for node in found)
        return cls(found, flops / rates.default.rate, rates.step, held, allowed(rates))

    @property
    def pays(self) -> bool:
        return bool(self.products) and self.seconds >= self.cost

    @property
    def fits(self) -> bool:
        return self.held <= self.bound

    @property
    def brief(self) -> str:
        """Why the exchange is not started before these products, a clause of the sentence."""
        if self.pays:
            held, bound = bytes_text(self.held), bytes_text(self.bound)
            return f"{held} would be under way behind {self}, and at most {bound} may be"
        return f"{self} is less than the {duration(self.cost)} that it costs to start apart"

    def __str__(self) -> str:
        names = dict.fromkeys((module_path(node) or op_name(node)).rsplit(".", 1)[-1] for node in self.products)
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return f"{', '.join(list(names)[:SHOWN])}{more} ({duration(self.seconds)})"


def note(node: fx.Node, ahead: Meanwhile, behind: Meanwhile, aside: Meanwhile, why: str) -> str:
    """A sentence for the report: what the exchange of one attention or recurrence overlaps with, ahead of it, in the
    backward (`behind`), and at its end (`aside`); or `why` it starts with that. `needed`: by its first messages."""
    if why:
        return f"its exchange starts with it: {why}"
    first, then, home = f"behind {ahead}", f"behind the gradients of {behind}", ""
    if not (ahead.pays and ahead.fits):
        first = "with it, for " + (ahead.brief if ahead.products else nothing_ahead(node))
    if not (behind.pays and behind.fits):
        then = "with it, for " + (behind.brief if behind.products else nothing_behind(node))
    if aside.pays:
        home = f", and ends behind those of {aside}" if aside.fits else f", and ends with it, for {aside.brief}"
    return f"its exchange starts {first}; in the backward {then}{home}"


def nothing_ahead(node: fx.Node) -> str:
    """Why nothing is computed between the first messages of an exchange and its operator."""
    recurs = is_recurrence(node)
    return "its operands need all that stands before it" if recurs else "nothing stands between that needs no K and V"


def nothing_behind(node: fx.Node) -> str:
    """And in the backward."""
    return "it is the last" if starts_back(node) else "the kernel computes its forward again there first"

"""Rates of computation and communication: of hardware from the table, or as measured on this machine.

    seconds of a tile     = overhead + queries * query + FLOPs / rate   by kernel, dtype, direction, shape
    seconds of an exchange = latency * messages + bytes / rate                     both directions at once
    seconds of a step     = max(compute, exchange) + (1 - overlap) * min(compute, exchange)

Ranks of one node share a link; where nodes are joined by another, messages within a node and between nodes travel
concurrently, each kind over its own.

A step is a pipeline: communication hides behind computation, as far as the machine lets it. On a GPU `overlap` is 1;
where the cores that compute also copy the messages, it is less.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any

from ringopt.hardware.devices import OF_CORES, Device, Link, device_named, device_of, link_of

LAUNCH = 10e-6  # seconds to launch a kernel on a GPU


@dataclass(frozen=True)
class Speed:
    """`rate`: FLOP/s; `overhead`: seconds a tile; `query`: seconds a query of a head: kernels take keys in blocks, so a
    causal tile costs each query some keys that it does not see."""

    rate: float
    overhead: float = 0.0
    query: float = 0.0

    def seconds(self, flops: float, queries: int = 0) -> float:
        return self.overhead + queries * self.query + flops / self.rate


@dataclass(frozen=True)
class Rates:
    """The rates of one rank.

    source   where the numbers are from, for users
    default  of tiles that `speeds` does not know
    speeds   by "kernel dtype forward|backward full|causal|masked"
    touch    bytes/s at which merged results are read and written
    calls    seconds of overhead an attention, apart from tiles, steps and messages, by "keys|queries|heads
             forward|backward": what is communicated in it
    step     seconds of overhead a step
    memory   bytes of the device; 0 where that is not known
    part     an attention may hold one of so many parts of `memory`
    node     consecutive ranks that `link` joins, where `between` joins such nodes; 0: all, or not known
    """

    source: str
    link: Link
    default: Speed
    speeds: Mapping[str, Speed] = field(default_factory=dict)
    touch: float = 10e9
    overlap: float = 1.0
    calls: Mapping[str, float] = field(default_factory=dict)
    step: float = 0.0
    memory: int = 0
    part: int = OF_CORES.part
    node: int = 0
    between: Link | None = None

    def __hash__(self) -> int:  # speeds and calls are dicts
        return hash(self.digest)

    def tile(self, kernel: str, dtype: str, backward: bool, shape: str) -> Speed:
        """The speed of a tile of shape "full", "causal" or "masked". Where that was not measured, that of a full one;
        of a dtype that was not, that of float32."""
        way = "backward" if backward else "forward"
        for tile in dict.fromkeys((shape, "full")):
            for measured in (dtype, "float32"):
                if (speed := self.speeds.get(f"{kernel} {measured} {way} {tile}")) is not None:
                    return speed
        return self.default

    def call(self, what: str, backward: bool) -> float:
        """Seconds of overhead an attention in which `what` ("keys", "queries", "heads") is communicated."""
        return self.calls.get(f"{what} {'backward' if backward else 'forward'}", 0.0)

    def step_seconds(self, compute: float, exchange: float) -> float:
        return max(compute, exchange) + (1 - self.overlap) * min(compute, exchange) + self.step

    def exchange_seconds(self, size: float, messages: int) -> float:
        """Seconds of `messages` of `size` bytes in total, while as much goes the other way."""
        return self.link.latency * messages + size / self.link.rate

    def two_ways(self, there: float, back: float) -> float:
        """Seconds of both directions together, of which each alone would take so long in an even exchange."""
        return self.link.one_way * max(there, back) + (1 - self.link.one_way) * min(there, back)

    def tiers(self, ranks: int) -> bool:
        """Whether so many ranks span several nodes with a link of their own between them."""
        return self.between is not None and 0 < self.node < ranks

    def crosses(self, source: int, target: int) -> bool:
        """Whether a message between two ranks takes the link between nodes."""
        return self.between is not None and self.node > 0 and source // self.node != target // self.node

    @cached_property
    def beyond(self) -> Rates:
        """The rates of ranks that are each on a node of its own."""
        return self if self.between is None else dataclasses.replace(self, link=self.between, node=0, between=None)

    def every(self, stride: int) -> Rates:
        """The rates of the submesh of every `stride`-th rank, renumbered."""
        if self.between is None or self.node % stride or self.node == stride:
            return self.beyond
        return dataclasses.replace(self, node=self.node // stride)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def of_dict(cls, data: Mapping[str, Any]) -> Rates:
        """The inverse of `to_dict`. Raises KeyError or TypeError for any other data."""
        speeds = {name: Speed(**speed) for name, speed in data["speeds"].items()}
        between = data.get("between")
        links = {"link": Link(**data["link"]), "between": Link(**between) if between is not None else None}
        return cls(**{**data, **links, "default": Speed(**data["default"]), "speeds": speeds})

    @cached_property
    def digest(self) -> str:
        """A hash of all numbers, equal on all machines."""
        return hashlib.blake2b(json.dumps(self.to_dict(), sort_keys=True).encode(), digest_size=8).hexdigest()


def rates_of(hardware: str, dtype: str = "bfloat16", link: str | None = None) -> Rates:
    """The rates of a device from the table, over its own links, or over `link` between any two. Overheads are those of
    a kernel launch, 10 us.

    Raises OptionError for names that the tables lack.
    """
    device, wire = device_of(hardware), link_of(link or device_of(hardware).link)
    launch, source = 0.0 if device.name == "cpu" else LAUNCH, f"data sheet of {device.name}, {wire.name}"
    memory, part = device.memory, device.limits.part
    speed = Speed(device.flops(dtype), launch)
    found = Rates(source, wire, speed, touch=device.bandwidth, memory=memory, part=part)
    if link is not None or not device.node:
        return found
    source = f"{source} in nodes of {device.node} and {device.network} between"
    return dataclasses.replace(found, source=source, node=device.node, between=link_of(device.network))


def by_name(name: str, memory: int) -> Rates | None:
    """The rates of the data sheet of a device as its driver calls it, with as much memory as it has; None of one that
    the table lacks. Cards that are not joined by the table's link say so in their name."""
    device = device_named(name)
    if device is None:
        return None
    link = PCI_EXPRESS.get(device.name, "pcie5") if "pcie" in name.lower() else None
    found = rates_of(device.name, link=link)
    source = f"{found.source}; not measured, take `ringopt bench --calibrate`"
    return dataclasses.replace(found, source=source, memory=memory, speeds=_speeds(device))


# Generations of cards without a link of their own.
PCI_EXPRESS = {"p100": "pcie3", "v100": "pcie3", "a100": "pcie4"}


def _speeds(device: Device) -> dict[str, Speed]:
    """Of all kernels for GPUs in all dtypes, in the terms of a profile."""
    names = product(("flash", "cudnn", "efficient", "math"), device.peak, ("forward", "backward"))
    return {f"{kernel} {dtype} {way} full": Speed(device.flops(dtype), LAUNCH) for kernel, dtype, way in names}


def cautious() -> Rates:
    """Rates where nothing was measured: only computation counts, at the table's rate of a CPU core; communication is
    almost free. Of strategies that tie, the one that sends less is taken; memory is unknown, so only strategies as lean
    as the ring may be chosen."""
    table, free = rates_of("cpu", "float32"), 1e15
    return Rates("no profile: only work counts", Link("unknown", free, 0.0), table.default, touch=free)


def with_link(rates: Rates) -> Rates:
    """Where nothing is known of the link, that of the table's CPU: for a choice of what costs bytes or computation."""
    return rates if rates.link.name != "unknown" else dataclasses.replace(rates, link=link_of(device_of("cpu").link))

"""What devices and links are capable of, from their makers' data sheets.

Peak figures, dense (no sparsity), of one device; a link's rate is that of one direction. `efficiency` is the share of
the peak that attention reaches at best: 0.73 on A100 (Dao, FlashAttention-2, 2023, section 4.1), 0.75 on H100 (Shah et
al., FlashAttention-3, 2024, section 4.1); where no paper measured it, half.

Sources: NVIDIA data sheets "Tesla P100", "V100", "A100", "H100", "H200", "DGX B200"; PCI-SIG for PCIe (16 lanes, after
128b/130b coding); IBTA for InfiniBand (EDR, HDR, NDR, four lanes). The CPU entry is one core with AVX-512 in float32,
and "memory" the rate at which a process reads another's memory on one machine: neither has a data sheet, both are round
numbers below what such machines measure (`ringopt bench --calibrate`).

Nodes are those of the maker: DGX-1 (P100, V100; its four EDR ports serve two devices each, and are counted as if each
device had one), DGX A100, DGX H100, H200 and B200 (a port for each device).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeVar

from ringopt.errors import OptionError

T = TypeVar("T")

TERA, GIGA, GIB = 10**12, 10**9, 2**30


@dataclass(frozen=True)
class Link:
    """One direction between two ranks while as much goes the other way: bytes/s, and seconds a message. `one_way`: the
    share of that time that a message takes when nothing goes the other way; 1 for full duplex, 0.5 where both
    directions share the processors that copy them."""

    name: str
    rate: float
    latency: float
    one_way: float = 1.0


@dataclass(frozen=True)
class Limits:
    """Into how much the work of an attention is cut: as much as hides messages, and no more calls of a kernel than keep
    the device busy. On cores that also move the messages many small pieces are best; a GPU wants calls that fill it,
    and its messages travel by themselves.

    exchanges  that one is cut into at most, to take turns
    message    bytes of the largest message of each, at least: smaller ones cost more to handle than they hide
    strip      queries of a forward tile, or an eighth of those of a rank if that is more; 0: all at once
    least      the fewest queries of a tile with a mask of its own, unless that would be too large: fewer leave a kernel
               idle
    mask       elements of a mask that is held at once: memory is not to grow with the square of the tokens of a rank
    scores     elements of scores that are held at once, where they are written out
    merged     results of tiles that wait to be merged at once, where Triton can; 1: each is merged as it comes
    part       of the device's memory an attention may hold one of so many parts
    """

    exchanges: int
    message: int
    strip: int
    least: int
    mask: int
    scores: int
    merged: int
    part: int


# Measured on two cores; on GPUs not measured: one call a block, 256 MiB of masks and 1 GiB of scores in 32 bits.
OF_CORES = Limits(exchanges=8, message=1 << 19, strip=1024, least=64, mask=1 << 22, scores=1 << 22, merged=1, part=64)
OF_GPUS = Limits(exchanges=1, message=1 << 19, strip=0, least=512, mask=1 << 26, scores=1 << 28, merged=4, part=16)


@dataclass(frozen=True)
class Device:
    """`peak`: FLOP/s by dtype; `memory`: bytes; `bandwidth`: bytes/s of that memory; `link`: between devices of a node;
    `node`: devices of a node, 0 where one link joins all; `network`: the link between nodes; `limits`: how work is cut
    for it."""

    name: str
    peak: dict[str, float]
    memory: int
    bandwidth: float
    efficiency: float
    link: str
    node: int = 0
    network: str = ""
    limits: Limits = OF_GPUS

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability of a GPU; None for what is none."""
        return CAPABILITIES.get(self.name)

    def flops(self, dtype: str) -> float:
        """FLOP/s that attention reaches at best. A dtype that is not listed counts as the slowest that is."""
        return self.peak.get(dtype, min(self.peak.values())) * self.efficiency


def tensor_cores(float32: float, float16: float, bfloat16: float) -> dict[str, float]:
    """Peaks in FLOP/s by dtype, of figures in TFLOP/s."""
    return {"float32": float32 * TERA, "float16": float16 * TERA, "bfloat16": bfloat16 * TERA}


LINKS = {
    link.name: link
    for link in (
        Link("memory", 4 * GIGA, 50e-6, one_way=0.5),
        Link("ethernet-10g", 1.25 * GIGA, 50e-6),
        Link("ethernet-100g", 12.5 * GIGA, 30e-6),
        Link("pcie3", 15.75 * GIGA, 10e-6),
        Link("pcie4", 31.5 * GIGA, 10e-6),
        Link("pcie5", 63 * GIGA, 10e-6),
        Link("nvlink1", 80 * GIGA, 10e-6),
        Link("nvlink2", 150 * GIGA, 10e-6),
        Link("nvlink3", 300 * GIGA, 10e-6),
        Link("nvlink4", 450 * GIGA, 10e-6),
        Link("nvlink5", 900 * GIGA, 10e-6),
        Link("infiniband-edr", 12.5 * GIGA, 15e-6),
        Link("infiniband-hdr", 25 * GIGA, 15e-6),
        Link("infiniband-ndr", 50 * GIGA, 15e-6),
    )
}

DEVICES = {
    device.name: device
    for device in (
        Device("cpu", {"float32": 50 * GIGA, "float64": 25 * GIGA}, 4 * GIB, 10 * GIGA, 1.0, "memory", limits=OF_CORES),
        # Pascal has no tensor cores, and no bfloat16: that runs as float32.
        Device("p100", tensor_cores(10.6, 21.2, 10.6), 16 * GIB, 732 * GIGA, 0.5, "nvlink1", 8, "infiniband-edr"),
        Device("v100", tensor_cores(15.7, 125, 15.7), 32 * GIB, 900 * GIGA, 0.5, "nvlink2", 8, "infiniband-edr"),
        Device("a100", tensor_cores(19.5, 312, 312), 80 * GIB, 2039 * GIGA, 0.73, "nvlink3", 8, "infiniband-hdr"),
        Device("h100", tensor_cores(67, 989, 989), 80 * GIB, 3350 * GIGA, 0.75, "nvlink4", 8, "infiniband-ndr"),
        Device("h200", tensor_cores(67, 989, 989), 141 * GIB, 4800 * GIGA, 0.75, "nvlink4", 8, "infiniband-ndr"),
        Device("b200", tensor_cores(75, 2250, 2250), 180 * GIB, 8000 * GIGA, 0.5, "nvlink5", 8, "infiniband-ndr"),
    )
}

CAPABILITIES = {"p100": (6, 0), "v100": (7, 0), "a100": (8, 0), "h100": (9, 0), "h200": (9, 0), "b200": (10, 0)}


def device_of(name: str) -> Device:
    """The device of that name. Raises OptionError for one that DEVICES lacks."""
    return _found("hardware", name, DEVICES)


def limits_of(device_type: str) -> Limits:
    """Of tensors on devices of a type, the same for all of them: the ranks of a mesh cut alike."""
    return OF_CORES if device_type in ("cpu", "meta") else OF_GPUS


def device_named(product: str) -> Device | None:
    """The device of the table that a driver calls `product`, such as "NVIDIA H100 80GB HBM3"."""
    words = re.split(r"[^a-z0-9]+", product.lower())
    return next((device for name, device in DEVICES.items() if name in words and name != "cpu"), None)


def link_of(name: str) -> Link:
    """The link of that name. Raises OptionError for one that LINKS lacks."""
    return _found("link", name, LINKS)


def _found(what: str, name: str, table: dict[str, T]) -> T:
    found = table.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise OptionError(f"{what} {name!r} is unknown; the table has {', '.join(table)}")
    return found

"""Which call has made a tensor: what a compiled graph returned or wrote is known by that, and not read again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ringopt.distributed.consistency import digest
from ringopt.distributed.mesh import Mesh
from ringopt.torch_compat.tensors import version_of


@dataclass
class Origins:
    """Of one rank. `made` holds, of each tensor that is alive, its version when it was made and a digest of the call,
    which are counted: in the same way on all ranks."""

    calls: int = 0
    made: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def note(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Of one call; each under its name in it."""
        self.calls += 1
        for name, x in tensors:
            if (now := version(x)) is not None:
                self.made[x] = now, digest(f"{self.calls} {name}".encode())[0]

    def of(self, value: Any) -> int | None:
        """The digest of the call that has made `value`, if nobody has written to it since."""
        known = self.made.get(value) if isinstance(value, Tensor) else None
        return known[1] if known is not None and known[0] == version(value) else None


# Ranks that are threads of one process share a mesh, hence the rank.
_origins: WeakKeyDictionary[Mesh, dict[int, Origins]] = WeakKeyDictionary()


def origins_of(mesh: Mesh) -> Origins:
    """Those of the rank that asks."""
    return _origins.setdefault(mesh, {}).setdefault(mesh.rank, Origins())


def version(value: Any) -> int | None:
    """None for what does not count its writes."""
    return version_of(value) if isinstance(value, Tensor) and not value.is_inference() else None

"""A .pt2 file with something in it changed, for tests."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, export

MODEL = "models/model.json"


class Small(nn.Module):
    """Attention, a size that depends on a size, a buffer, a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(4, 12)
        self.rows: Tensor
        self.register_buffer("rows", torch.arange(4.0))

    def forward(self, ids: Tensor, *, scale: Tensor, how: str = "none") -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(ids).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        return mixed * scale + self.rows + torch.zeros(2 * ids.shape[1] + 1).sum()


def save_small(path: Path) -> Path:
    inputs = {"scale": torch.ones(4), "how": "none"}
    shapes = {"ids": {1: Dim("n", min=4, max=64)}, "scale": None, "how": None}
    torch.export.save(export(Small(), (torch.rand(1, 8, 4),), inputs, dynamic_shapes=shapes), path)
    return path


def model_of(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(MODEL)]
        found: dict[str, Any] = json.loads(archive.read(name))
        return found


def rewritten(
    source: Path,
    target: Path,
    model: Callable[[dict[str, Any]], Any] | None = None,
    members: Mapping[str, bytes | Callable[[bytes], bytes]] | None = None,
    more: Mapping[str, bytes] | None = None,
    compression: int = zipfile.ZIP_STORED,
) -> Path:
    """`model` changes the JSON of the program, in place or by what it returns; `members` replaces members by the end
    of their names, `more` adds some, within the folder of the others unless they begin with /."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        folder = old.namelist()[0].partition("/")[0]
        for name in old.namelist():
            content = old.read(name)
            if model is not None and name.endswith(MODEL):
                said = json.loads(content)
                changed = model(said)
                content = json.dumps(said if changed is None else changed).encode()
            for end, other in (members or {}).items():
                if name.endswith(end):
                    content = other(content) if callable(other) else other
            new.writestr(name, content)
        for name, content in (more or {}).items():
            new.writestr(name if name.startswith("/") else f"{folder}/{name}", content)
    return target

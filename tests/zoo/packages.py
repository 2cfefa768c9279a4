"""Where the third-party packages of the zoo are found, and what stands in a model's way where they are not."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys

import torch

PACKAGES = {
    "hf": "transformers", "timm": "timm", "diffusers": "diffusers", "xt": "x_transformers", "vitp": "vit_pytorch",
}  # fmt: skip


def missing(family: str) -> str:
    """Why the models of a family cannot be built here, "" where they can."""
    package = PACKAGES.get(family)
    if package is None:
        return ""
    make_importable()
    found = importlib.util.find_spec(package) is not None
    return "" if found else f"{package} is not installed (RINGOPT_ZOO may name a folder that holds it)"


@functools.cache
def make_importable() -> None:
    """Puts the folder RINGOPT_ZOO, if given, on the path. Weights are random: nothing is fetched from anywhere."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    folder = os.environ.get("RINGOPT_ZOO")
    if folder:
        sys.path.append(folder)
        import_torchvision()


def import_torchvision() -> None:
    """Imports torchvision, which timm needs, also where it was built for another torch than the one at hand.

    Its compiled operators do not load then, and registering their meta functions fails; they are declared here, and
    none is ever called.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    for _ in range(20):
        try:
            import torchvision  # noqa: F401
        except RuntimeError as error:
            name = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if name is None:
                raise
            declarations().define(f"{name[1]}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
            for module in [module for module in sys.modules if module.partition(".")[0] == "torchvision"]:
                del sys.modules[module]
        else:
            return


@functools.cache
def declarations() -> torch.library.Library:
    return torch.library.Library("torchvision", "FRAGMENT")

"""What libraries that compile for the user pass as options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringopt.errors import OptionError
from ringopt.options import Options, with_defaults


def check_options(options: Mapping[str, Any] | None, library: str) -> None:
    """Of a user, for a `library` that makes the mesh. Raises OptionError."""
    Options.of(options)
    if "mesh" in (options or {}):
        raise OptionError(f"option mesh: {library} makes the mesh; leave it out, and set cp_size")


def chosen_options(options: Mapping[str, Any] | None, mesh: Any, averaged: bool) -> dict[str, Any]:
    """For the model of a training on `mesh`, whose gradients a wrapper averages over all ranks, or none does. What the
    user's `options`, `ringopt.defaults` and RINGOPT_OPTIONS leave open is as trainings want it: logits that nobody
    reads are not gathered, and gradients are reduced once."""
    chosen: dict[str, Any] = {"outputs": "lazy", "sync_gradients": not averaged}
    outside = with_defaults(None).outside
    return {**{name: value for name, value in chosen.items() if name not in outside}, **(options or {}), "mesh": mesh}

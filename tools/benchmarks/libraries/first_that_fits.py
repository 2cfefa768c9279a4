"""Arguments of a forward by trial: of what each may be, the first combination that the model takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from ringopt.tools.benchmarks.libraries.widened import Widened

Given = dict[str, Any]
TRIES = 2000


def first_that_fits(model: Any, forms: dict[str, list[Any]], finish: Callable[[Given], Given] = dict) -> Given:
    """Of arguments by name, what each may be (None: it is left out), the last one varied fastest; `finish` completes
    a choice. Raises ValueError where the model takes none."""
    failed: list[str] = []
    for chosen in itertools.islice(itertools.product(*forms.values()), TRIES):
        try:
            with torch.no_grad(), Widened():
                given = finish({name: value for name, value in zip(forms, chosen, strict=True) if value is not None})
                model(**given)
            return given
        except Exception as error:  # of whatever kind: the next one may be right
            failed.append(f"{type(error).__name__}: {error}")
    raise ValueError(f"no arguments fit: {'; or '.join(dict.fromkeys(failed))}")

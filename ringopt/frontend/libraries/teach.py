"""Dynamo is taught the forms of what libraries define, as soon as a program has loaded them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ringopt.errors import first_line
from ringopt.frontend.libraries.causal_conv1d import conv_form
from ringopt.frontend.libraries.fla import FLA
from ringopt.frontend.libraries.mamba_ssm import CHUNK_SCAN, MODULE, split_form
from ringopt.output.printable import logger
from ringopt.torch_compat.dynamo import before_each_trace

log = logger(__name__)

Form = Callable[[Callable[..., Any]], Callable[..., Any]]

FORMS: dict[tuple[str, str], Form] = {
    **{(scan.module, scan.name): scan.form for scan in (*FLA, CHUNK_SCAN)},
    (MODULE, "mamba_split_conv1d_scan_combined"): split_form,
    ("causal_conv1d", "causal_conv1d_fn"): conv_form,
}
taught = dict[tuple[str, str], Any]()


def teach_libraries() -> None:
    """For all that is compiled in this process from here on, and again before each trace: a program may load a library
    later."""
    before_each_trace(teach_loaded)


def teach_loaded() -> None:
    """Those of the loaded libraries that are not known yet."""
    for (module, name), form in FORMS.items():
        function = getattr(sys.modules.get(module), name, None)
        if callable(function) and taught.get((module, name)) is not function:
            taught[module, name] = function
            try:
                torch.compiler.substitute_in_graph(function, skip_signature_check=True)(form(function))
            except Exception as error:  # of whatever kind: the library may be another release, or have a form already
                why = f"{type(error).__name__}: {first_line(error)}"
                log.warning("calls of %s.%s break the graph, and are not on shards: %s", module, name, why)

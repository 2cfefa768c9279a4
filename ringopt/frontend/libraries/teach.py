"""Dynamo is taught the forms of what libraries define, as soon as a program has loaded them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ringopt.errors import first_line
from ringopt.frontend.libraries.causal_conv1d import conv_form
from ringopt.frontend.libraries.fla import FLA
from ringopt.frontend.libraries.liger import KERNELS, OPS
from ringopt.frontend.libraries.liger_losses import cross_entropy_form, linear_cross_entropy_form
from ringopt.frontend.libraries.mamba_ssm import CHUNK_SCAN, MODULE, split_form
from ringopt.frontend.libraries.transformers_packed import teach_packed
from ringopt.output.printable import logger
from ringopt.torch_compat.dynamo import before_each_trace
from ringopt.torch_compat.dynamo_calls import in_the_place_of_apply, not_traced

log = logger(__name__)

Form = Callable[[Callable[..., Any]], Callable[..., Any]]

LIGER: dict[tuple[str, str], Form] = {
    **{(f"{OPS}.{kernel.file}", kernel.name): kernel.form for kernel in KERNELS},
    (f"{OPS}.cross_entropy", "LigerCrossEntropyFunction"): cross_entropy_form,
    (f"{OPS}.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction"): linear_cross_entropy_form,
}


def dispatch_form(dispatch: Any) -> Callable[..., Any]:
    """Of Liger's `dispatch(operation, ...)` (0.8); what names an implementation is left to it."""
    untraced, forms = not_traced(dispatch), dict[str, Callable[..., Any]]()
    for (module, name), form in LIGER.items():
        if module in sys.modules:
            forms[module.removeprefix(f"{OPS}.")] = form(getattr(sys.modules[module], name))

    def traced(operation: str, *args: Any, **kwargs: Any) -> Any:
        asked = [name for name in ("impl", "backend", "mode") if kwargs.get(name) is not None]
        if operation not in forms or asked:
            return untraced(operation, *args, **kwargs)
        return forms[operation](*args, **kwargs)

    return traced


FORMS: dict[tuple[str, str], Form] = {
    **{(scan.module, scan.name): scan.form for scan in (*FLA, CHUNK_SCAN)},
    (MODULE, "mamba_split_conv1d_scan_combined"): split_form,
    ("causal_conv1d", "causal_conv1d_fn"): conv_form,
    **LIGER,  # of an autograd.Function: a form of its `apply`
    ("liger_kernel.backends", "dispatch"): dispatch_form,
}
PACKED = (
    ("transformers.utils.generic", "is_flash_attention_requested"),
    ("transformers.integrations.sdpa_attention", "sdpa_attention_forward"),
)
taught = dict[tuple[Any, ...], Any]()


def teach_libraries() -> None:
    """For all that is compiled in this process from here on, and again before each trace: a program may load a library
    later."""
    before_each_trace(teach_loaded)


def teach_loaded() -> None:
    """Those of the loaded libraries that are not known yet."""
    asked, sdpa = (getattr(sys.modules.get(module), name, None) for module, name in PACKED)
    if asked is not None and sdpa is not None and PACKED not in taught:
        taught[PACKED] = (asked, sdpa)
        teach_packed(asked, sdpa)
    for (module, name), form in FORMS.items():
        function = getattr(sys.modules.get(module), name, None)
        if callable(function) and taught.get((module, name)) is not function:
            taught[module, name] = function
            try:
                if isinstance(function, type):
                    in_the_place_of_apply(function, form(function))
                    continue
                torch.compiler.substitute_in_graph(function, skip_signature_check=True)(form(function))
            except Exception as error:  # of whatever kind: the library may be another release, or have a form already
                why = f"{type(error).__name__}: {first_line(error)}"
                log.warning("calls of %s.%s break the graph, and are not on shards: %s", module, name, why)

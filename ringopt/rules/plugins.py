"""Rules that other packages bring, and those that ringopt ships: read once, before the first program is compiled.

    [project.entry-points."ringopt.rules"]
    mylib = "mylib.ringopt_rules:declare"       # a function without arguments; or a module, which is imported

A plugin that fails is told and left out: no program ends for it.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from ringopt.errors import first_line
from ringopt.output.printable import logger
from ringopt.rules.declare import OF_PLUGINS, REGISTRY, SHIPPED
from ringopt.rules.flash_attn import declare_flash_attn
from ringopt.rules.transformer_engine import declare_transformer_engine

log = logger(__name__)

GROUP = "ringopt.rules"


@cache
def load_rules() -> tuple[str, ...]:
    """Sentences about those that failed."""
    with REGISTRY.filling(SHIPPED):
        declare_flash_attn()
        declare_transformer_engine()
    failed = []
    for plugin in entry_points(group=GROUP):
        try:
            with REGISTRY.filling(OF_PLUGINS):
                found = plugin.load()
                if callable(found):
                    found()
        except Exception as error:  # of whatever kind: it is another package's
            why = f"{type(error).__name__}: {first_line(error)}"
            failed.append(f"rules of {plugin.name} ({plugin.value}) are left out: {why}")
            log.warning("%s", failed[-1])
    return tuple(failed)

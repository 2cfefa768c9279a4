"""--verify of `ringopt convert`: the program before and after on generated inputs, on 1 to N processes of this machine.

Compared are outputs, buffers and inputs that are written, and the gradients of parameters and of floating inputs, from
random cotangents. The first process computes what is right and runs the converted program alone. For each further
number of ranks it starts that many of `python -m ringopt.tools.verify FOLDER RANK RANKS`, which talk through gloo and
say how far off they are; the first process judges.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringopt.errors import first_line
from ringopt.tools.common.command import CommandError, import_all

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from ringopt.runtime.verify import Values

# The files of FOLDER: the converted program, what it has to compute, modules to import, where the processes meet; and
# of each rank what it found and what it printed.
PROGRAM, EXPECTED, IMPORTS, STORE = "program.pt2", "expected.pt", "imports.json", "store"
FOUND, OUTPUT = "found", "output"
ERROR = "ringopt: error: "
MOST = max(8, os.cpu_count() or 1)  # processes


def verify(
    before: ExportedProgram, converted: Path, ranks: int, imports: Sequence[str], done: Callable[[], None]
) -> str:
    """Says how far outputs and gradients are apart; `done` is called after each number of ranks. Raises CommandError:
    no example inputs, random numbers, values that differ, a rank that fails."""
    import torch

    from ringopt.frontend.pt2.archive import load
    from ringopt.runtime.verify import distances

    if before.example_inputs is None:
        raise CommandError("--verify needs example inputs, and the program was saved without them")
    expected, why_not = expected_of(before)
    try:
        found = values(load(converted, trusted=True), gradients=not why_not)
    except Exception as error:  # whatever its operators raise
        raise CommandError(f"the converted program fails: {first_line(error)}; nothing was written") from None
    apart = distances(found, expected)
    judge(before, apart, expected, "1 process")
    done()
    for p in range(2, ranks + 1):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            os.symlink(converted.resolve(), folder / PROGRAM)
            torch.save(expected, folder / EXPECTED)
            (folder / IMPORTS).write_text(json.dumps(list(imports)))
            further = on_ranks(folder, p)
        judge(before, further, expected, f"{p} processes")
        apart = {name: max(error, further[name]) for name, error in apart.items()}
        done()
    return _verdict(apart, ranks, why_not)


def _verdict(apart: dict[str, float], ranks: int, why_not: str) -> str:
    from ringopt.runtime.verify import GRADIENT

    gradients = [error for name, error in apart.items() if name.startswith(GRADIENT)]
    others = [error for name, error in apart.items() if not name.startswith(GRADIENT)]
    where = "1 process" if ranks == 1 else f"1 to {ranks} processes"
    gradients_text = f"of a gradient {max(gradients):.1e}" if gradients else f"gradients were not compared: {why_not}"
    return f"; on {where} the largest difference of an output is {max(others, default=0.0):.1e}, {gradients_text}"


# ---- what a program computes -----------------------------------------------------------------------------------------
def expected_of(program: ExportedProgram) -> tuple[Values, str]:
    """What the program computes; and why no gradients are among it, "" where they are."""
    from ringopt.runtime.verify import GRADIENT

    try:
        found = values(program)
    except Exception as error:  # whatever its operators raise
        why = first_line(error)
    else:
        alone = not any(name.startswith(GRADIENT) for name in found)
        return found, "no output depends on a parameter or on a floating input" if alone else ""
    try:
        return values(program, gradients=False), f"the program has none ({why})"
    except Exception as error:
        raise CommandError(f"--verify: the program fails on generated inputs: {first_line(error)}") from None


def values(program: ExportedProgram, gradients: bool = True, seed: int = 0, shaken: float = 0.0) -> Values:
    """What the program returns and writes for its example inputs, floating ones drawn anew, the same on every call,
    and the gradients, by name. `seed` is for what it draws itself; `shaken`: with all numbers rounded anew, to so much
    of each."""
    import torch

    from ringopt.runtime.verify import perturbed
    from ringopt.torch_compat.pytree import tree_flatten, tree_unflatten

    torch.manual_seed(0)
    module, (leaves, spec) = program.module(), tree_flatten(program.example_inputs)
    leaves = [_drawn(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    before = {name: x.detach().clone() for name, x in state.items()}
    if shaken:
        leaves = [perturbed(leaf, shaken, place) for place, leaf in enumerate(leaves)]
        _refill(state, {name: perturbed(x, shaken, place) for place, (name, x) in enumerate(before.items())})
    torch.manual_seed(seed)
    try:
        found = called(program, module, leaves, lambda: tree_unflatten(leaves, spec), gradients)
        return found | {f"buffer {name}": x.clone() for name, x in module.named_buffers() if _differs(x, before[name])}
    finally:
        _refill(state, before)


def called(
    program: ExportedProgram, module: Any, leaves: Sequence[Any], given: Callable[[], Any], gradients: bool
) -> Values:
    """The values of one call with `given()`, whose leaves these are."""
    import torch

    from ringopt.torch_compat.pytree import tree_leaves

    named = dict(zip(map(str, program.graph_signature.user_inputs), leaves, strict=True))
    tensors = {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}
    before = {name: x.detach().clone() for name, x in tensors.items()}
    learned = {name: x for name, x in module.named_parameters() if x.requires_grad}
    learned |= {name: x.requires_grad_() for name, x in tensors.items() if gradients and _is_floating(x)}
    args, kwargs = given()
    with torch.set_grad_enabled(gradients):
        returned = tree_leaves(module(*args, **kwargs))
    found = {f"output {place}": x for place, x in enumerate(returned) if isinstance(x, torch.Tensor)}
    found |= {f"input {name}": x for name, x in tensors.items() if _differs(x, before[name])}
    found = {name: x.detach().clone() for name, x in found.items()}
    return found | _gradients_of(returned, learned) if gradients else found


def _refill(state: dict[str, Any], values: dict[str, Any]) -> None:
    import torch

    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(values[name])


def _drawn(value: Any) -> Any:
    import torch

    return torch.randn_like(value) if value.is_floating_point() else value.clone()


def _differs(one: Any, other: Any) -> bool:
    import torch

    return not torch.equal(one, other)


def _is_floating(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _gradients_of(returned: Sequence[Any], learned: dict[str, Any]) -> Values:
    import torch

    from ringopt.compare.hooked_graph import cotangent
    from ringopt.runtime.verify import GRADIENT

    outputs = [x for x in returned if isinstance(x, torch.Tensor) and x.requires_grad]
    if not outputs or not learned:
        return {}
    cotangents = [cotangent(x.shape, x) for x in outputs]
    found = torch.autograd.grad(outputs, list(learned.values()), cotangents, allow_unused=True)
    return {f"{GRADIENT}{name}": x for name, x in zip(learned, found, strict=True) if x is not None}


# ---- what may differ -------------------------------------------------------------------------------------------------
def judge(program: ExportedProgram, apart: dict[str, float], expected: Values, where: str) -> None:
    """Raises CommandError where values are further apart than their dtypes, or rounding the inputs anew, account
    for."""
    import torch

    from ringopt.compare.node_values import allowed_of
    from ringopt.runtime.verify import GRADIENT, ROUNDINGS, distances

    seen = [node.meta.get("val") for node in program.graph.nodes]
    dtypes = {x.dtype.to_real() for x in seen if _is_floating(x) or (isinstance(x, torch.Tensor) and x.is_complex())}
    bound = max(map(allowed_of, dtypes), default=0.0)
    if all(error <= bound for error in apart.values()):
        return
    gradients = any(name.startswith(GRADIENT) for name in expected)
    if any(error > bound for error in distances(values(program, gradients, seed=1), expected).values()):
        raise CommandError("--verify cannot compare what is drawn at random; export in eval mode")
    shaken = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    rounded = distances(values(program, gradients, shaken=shaken), expected)
    wrong = {name: error for name, error in apart.items() if error > max(bound, ROUNDINGS * rounded[name])}
    if wrong:
        worst = max(wrong, key=lambda name: wrong[name])
        much = "in size, dtype or value" if wrong[worst] == float("inf") else f"by {wrong[worst]:.1e} of its largest"
        raise CommandError(
            f"on {where} {len(wrong)} of {len(apart)} values differ, {worst} {much} element; nothing was written"
        )


# ---- on several ranks ------------------------------------------------------------------------------------------------
def on_ranks(folder: Path, p: int) -> dict[str, float]:
    """The largest differences on any of `p` ranks. The first that fails ends the others."""
    running = [started(folder, rank, p) for rank in range(p)]
    try:
        while any(process.poll() is None for process in running) and not any(process.poll() for process in running):
            time.sleep(0.05)
        failed = next((rank for rank, process in enumerate(running) if process.poll()), None)
    finally:
        for process in running:
            process.kill()
            process.wait()
    if failed is not None:
        output = (folder / f"{OUTPUT}{failed}").read_text().strip().splitlines() or ["it said nothing"]
        raise CommandError(f"rank {failed} of {p} failed: {output[-1].removeprefix(ERROR)}")
    found = [json.loads((folder / f"{FOUND}{rank}").read_text()) for rank in range(p)]
    return {name: max(each[name] for each in found) for name in found[0]}


def started(folder: Path, rank: int, p: int) -> subprocess.Popen[str]:
    """One rank, which imports from where this process does; what it says goes to a file."""
    command = [sys.executable, "-m", "ringopt.tools.verify", str(folder), str(rank), str(p)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with (folder / f"{OUTPUT}{rank}").open("w") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True)


def _one_rank(folder: Path, rank: int, p: int) -> None:
    import_all(json.loads((folder / IMPORTS).read_text()))
    import torch
    import torch.distributed as dist

    from ringopt.frontend.pt2.archive import load
    from ringopt.runtime.verify import GRADIENT, distances

    dist.init_process_group("gloo", init_method=f"file://{folder / STORE}", rank=rank, world_size=p)
    expected = torch.load(folder / EXPECTED, weights_only=True)
    found = values(load(folder / PROGRAM, trusted=True), gradients=any(name.startswith(GRADIENT) for name in expected))
    (folder / f"{FOUND}{rank}").write_text(json.dumps(distances(found, expected)))


def _main() -> None:
    folder, rank, p = sys.argv[1:]
    try:
        _one_rank(Path(folder), int(rank), int(p))
    except Exception as error:
        sys.exit(f"{ERROR}{first_line(error)}")


if __name__ == "__main__":
    _main()

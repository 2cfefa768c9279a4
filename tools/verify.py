"""--verify of `ringopt convert`: the program before and after on generated inputs, on 1 to N processes of this machine.

The first process computes what is right and runs the converted program alone. For each further number of ranks it
starts that many of `python -m ringopt.tools.verify FOLDER RANK RANKS`, which talk through gloo.
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

from ringopt.tools.command import CommandError, import_all

if TYPE_CHECKING:
    from torch.export import ExportedProgram

# The files of FOLDER: the converted program, what it has to return, modules to import, where the processes meet.
PROGRAM, EXPECTED, IMPORTS, STORE = "program.pt2", "expected.pt", "imports.json", "store"
ERROR = "ringopt: error: "


def verify(
    before: ExportedProgram, converted: Path, ranks: int, imports: Sequence[str], done: Callable[[], None]
) -> str:
    """Says how far the outputs are apart; `done` is called after each number of ranks. Raises CommandError: no example
    inputs, random numbers, outputs that differ, a rank that fails."""
    import torch

    from ringopt.archive import load

    if before.example_inputs is None:
        raise CommandError("--verify needs example inputs, and the program was saved without them")
    expected = outputs(before)
    worst = compared(outputs(load(converted)), expected, lambda: outputs(before, seed=1))
    done()
    for p in range(2, ranks + 1):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            os.symlink(converted.resolve(), folder / PROGRAM)
            torch.save(expected, folder / EXPECTED)
            (folder / IMPORTS).write_text(json.dumps(list(imports)))
            worst = max(worst, on_ranks(folder, p))
        done()
    where = "1 process" if ranks == 1 else f"1 to {ranks} processes"
    return f"; on {where} the largest difference of an output is {worst:.1e}"


def outputs(program: ExportedProgram, seed: int = 0) -> list[Any]:
    """What the program returns for its example inputs, floating ones drawn anew, the same on every call. `seed` is for
    what it draws itself."""
    import torch
    from torch.utils._pytree import tree_leaves, tree_map_only

    def drawn(value: torch.Tensor) -> torch.Tensor:
        return torch.randn_like(value) if value.is_floating_point() else value.clone()

    torch.manual_seed(0)
    args, kwargs = tree_map_only(torch.Tensor, drawn, program.example_inputs)
    torch.manual_seed(seed)
    with torch.no_grad():
        return tree_leaves(program.module()(*args, **kwargs))


def compared(found: list[Any], expected: list[Any], again: Callable[[], list[Any]]) -> float:
    """The largest difference. `again` computes what is expected from another seed, to tell chance from error."""
    import torch

    pairs = [pair for pair in zip(found, expected, strict=True) if isinstance(pair[1], torch.Tensor)]
    try:
        return max((distance(one, other) for one, other in pairs), default=0.0)
    except CommandError:
        repeated = [one for one in again() if isinstance(one, torch.Tensor)]
        if not all(torch.equal(one, other) for one, (_found, other) in zip(repeated, pairs, strict=True)):
            raise CommandError("--verify cannot compare what is drawn at random; export in eval mode") from None
        raise


def distance(found: Any, expected: Any) -> float:
    """Relative to the largest element; where numbers are not floating ones, nothing may differ."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        sizes = f"{list(found.shape)} {found.dtype} and {list(expected.shape)} {expected.dtype}"
        raise CommandError(f"outputs differ: {sizes}; nothing was written")
    from ringopt.verify import TOLERANCE

    one, other = found.double(), expected.double()
    difference = (one - other).nan_to_num().abs().max().item() if one.numel() else 0.0
    relative = difference / max(other.nan_to_num().abs().max().item(), 1e-30) if difference else 0.0
    allowed = TOLERANCE.get(found.dtype, 0.0)
    if relative > allowed or not bool((one.isnan() == other.isnan()).all()):
        raise CommandError(f"outputs differ by {relative:.1e} of the largest element; nothing was written")
    return float(relative)


# ---- on several ranks ------------------------------------------------------------------------------------------------
def on_ranks(folder: Path, p: int) -> float:
    """The largest difference on any of `p` ranks. The first that fails ends the others."""
    running = [started(folder, rank, p) for rank in range(p)]
    try:
        while any(process.poll() is None for process in running) and not any(process.poll() for process in running):
            time.sleep(0.05)
        failed = next((rank for rank, process in enumerate(running) if process.poll()), None)
    finally:
        for process in running:
            process.kill()
            process.wait()
    said = [(folder / f"said{rank}").read_text().strip().splitlines() or ["it said nothing"] for rank in range(p)]
    if failed is not None:
        raise CommandError(f"rank {failed} of {p} failed: {said[failed][-1].removeprefix(ERROR)}")
    return max(float(lines[-1]) for lines in said)


def started(folder: Path, rank: int, p: int) -> subprocess.Popen[str]:
    """One rank, which imports from where this process does; what it says goes to a file."""
    command = [sys.executable, "-m", "ringopt.tools.verify", str(folder), str(rank), str(p)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with (folder / f"said{rank}").open("w") as said:
        return subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT, text=True)


def one_rank(folder: Path, rank: int, p: int) -> float:
    import_all(json.loads((folder / IMPORTS).read_text()))
    import torch
    import torch.distributed as dist

    from ringopt.archive import load

    dist.init_process_group("gloo", init_method=f"file://{folder / STORE}", rank=rank, world_size=p)
    expected = torch.load(folder / EXPECTED, weights_only=True)
    return compared(outputs(load(folder / PROGRAM)), expected, lambda: expected)


def main() -> None:
    folder, rank, p = sys.argv[1:]
    try:
        print(one_rank(Path(folder), int(rank), int(p)))
    except Exception as error:
        sys.exit(f"{ERROR}{error}")


if __name__ == "__main__":
    main()

"""What the program computed since the last operator that talks, told to whoever records what ranks do when."""

from __future__ import annotations

from ringopt.distributed.mesh import Mesh
from ringopt.distributed.traffic import log_event

PROGRAM = "the program"


def program_until_here(mesh: Mesh) -> None:
    """To be told at the begin of an operator before which messages may be under way: without it, blocks of attention
    would seem to take as long as what stands before them."""
    log_event("computed", PROGRAM, mesh.teller)

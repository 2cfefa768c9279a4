"""What the bytecode of a frame says to a translator of Dynamo's: where jumps lead, which names are read later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch._dynamo.bytecode_analysis import HASFREE, HASLOCAL, JUMP_OPCODES, TERMINAL_OPCODES

__all__ = ["ASSERTION", "end_of_or", "following", "jumps_by_truth", "live_at", "way_to_go"]

ASSERTION = ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT")  # Dynamo keeps assertions


def jumps_by_truth(instruction: Any) -> bool:
    """Whether it goes one of two ways."""
    name = str(instruction.opname)
    return "JUMP" in name and name.endswith(("IF_TRUE", "IF_FALSE"))


def following(tx: Any, instruction: Any) -> Any:
    """The next one, as the program is written."""
    return tx.instructions[tx.indexof[instruction] + 1]


def behind_jumps(tx: Any, instruction: Any) -> Any:
    """The first instruction that does something."""
    while instruction.opname == "NOP" or (instruction.opname.startswith("JUMP_") and "IF" not in instruction.opname):
        instruction = following(tx, instruction) if instruction.opname == "NOP" else instruction.target
    return instruction


def way_to_go(tx: Any, jump: Any) -> tuple[bool, list[Any]]:
    """Which truth leads to a branch, and the instructions at which it has ended: those of the other way, which does
    nothing if this is the end of both."""
    on, jumped = following(tx, jump), jump.target
    truth = jump.opname.endswith("IF_TRUE")
    if behind_jumps(tx, on) is not on:  # if ...: continue
        return truth, [on, behind_jumps(tx, on)]
    return not truth, [jumped, behind_jumps(tx, jumped)]


def end_of_or(tx: Any, jump: Any) -> Any:
    """Of a jump behind a part of `if a or b or c:`, which leads to the branch if the part is true, the jump behind the
    last one, which leads past the branch if that is false; None of any other jump, and where parts have parts."""
    if not leads_on(jump, "TRUE"):
        return None
    first, place = tx.indexof[jump], tx.indexof[jump.target] - 1
    while place > first and tx.instructions[place].opname in ("NOP", "NOT_TAKEN"):
        place -= 1
    last, between = tx.instructions[place], tx.instructions[first:place]
    past = place > first and leads_on(last, "FALSE") and tx.indexof[last.target] > place + 1
    plain = all(leads_on(each, "TRUE") and each.target is jump.target for each in between if jumps_by_truth(each))
    return last if past and plain else None


def leads_on(instruction: Any, truth: str) -> bool:
    """Whether it is a jump that keeps no value, taken for such a truth."""
    return "POP_JUMP" in instruction.opname and str(instruction.opname).endswith(f"IF_{truth}")


# ---- names -----------------------------------------------------------------------------------------------------------
def live_at(instructions: list[Any], instruction: Any) -> set[str]:
    """The local names that are read from `instruction` on before they are set, where nothing is raised."""
    place = {each: number for number, each in enumerate(instructions)}
    live: list[set[str]] = [set() for _ in instructions]
    grows = True
    while grows:
        grows = False
        for number in reversed(range(len(instructions))):
            each = instructions[number]
            later = set[str]()
            for next_place in places_after(each, number, place):
                later |= live[next_place] if next_place < len(live) else set()
            found = {*names_read(each), *(later - set(names_set(each)))}
            if found != live[number]:
                live[number], grows = found, True
    return live[place[instruction]]


def places_after(instruction: Any, number: int, place: dict[Any, int]) -> Iterator[int]:
    """The numbers of those that may run next."""
    if instruction.opcode not in TERMINAL_OPCODES:
        yield number + 1
    if instruction.opcode in JUMP_OPCODES and instruction.target is not None:
        yield place[instruction.target]


def names_of(instruction: Any) -> list[str]:
    """The local names in it."""
    local = instruction.opcode in HASLOCAL or instruction.opcode in HASFREE
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    return [name for name in names if isinstance(name, str)] if local else []


def names_read(instruction: Any) -> list[str]:
    """Some that are set there too, where one instruction does both."""
    return names_of(instruction) if "LOAD" in instruction.opname or "DELETE" in instruction.opname else []


def names_set(instruction: Any) -> list[str]:
    """Those whose value before is not read."""
    name = instruction.opname
    return names_of(instruction) if "STORE" in name and "LOAD" not in name else []

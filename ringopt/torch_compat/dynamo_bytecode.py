"""What the bytecode of a frame says to a translator of Dynamo's: where jumps lead, which names are read later."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch._dynamo.bytecode_analysis import HASFREE, HASLOCAL, JUMP_OPCODES, TERMINAL_OPCODES
from torch._dynamo.variables.ctx_manager import GenericContextWrappingVariable

__all__ = [
    "Raise", "end_of_or", "following", "is_assertion", "jumps_by_truth", "live_at", "may_catch", "raised_by",
    "way_to_go",
]  # fmt: skip

ASSERTION = ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT")  # the error of an assertion


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


# ---- errors ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Raise:
    """One way of a jump that does nothing but to raise `error(words)`, taken where what decides has the truth `when`.
    Of an f-string only what is known as it is written is in `words`."""

    when: bool
    error: type[Exception]
    words: str


def raised_by(tx: Any, jump: Any) -> Raise | None:
    """What a jump that keeps no value leads to, if it is that."""
    if "POP_JUMP" not in jump.opname:
        return None
    truth = jump.opname.endswith("IF_TRUE")
    for when, start in ((not truth, following(tx, jump)), (truth, jump.target)):
        found = raise_at(tx, start)
        if found is not None:
            return Raise(when, *found)
    return None


def raise_at(tx: Any, start: Any) -> tuple[type[Exception], str] | None:
    """The error and its words, of `raise error` and `raise error(words)`, where the words call nothing that goes
    another way."""
    path = list[Any]()
    for each in tx.instructions[tx.indexof[start] :]:
        if each.opname == "RAISE_VARARGS":
            break
        if not each.opname.startswith((*BUILDS, *ASSERTION)):
            return None
        path += [each] if each.opname not in NOTHING else []
    else:
        return None
    error = raised_error(tx, path) if each.arg == 1 else None
    return (error, words_in(path)) if error is not None else None


def raised_error(tx: Any, path: list[Any]) -> type[Exception] | None:
    """The error that is loaded first, if it is raised with one argument or none, and is made of its words."""
    name = AssertionError.__name__ if path[0].opname in ASSERTION else path[0].argval
    error = named_error(tx, name) if path[0].opname in ("LOAD_GLOBAL", *ASSERTION) else None
    named = len(path) > 1 and path[1].opname in ("LOAD_ATTR", "LOAD_METHOD")
    several = path[-1].opname.startswith("CALL") and path[-1].arg > 1
    return error if error is not None and not named and not several and says_words(error) else None


def words_in(path: list[Any]) -> str:
    """The constant texts, with dots for what is filled in."""
    words = list[str]()
    for each in path:
        if each.opname == "LOAD_CONST" and isinstance(each.argval, str):
            words.append(each.argval)
        elif each.opname.startswith("FORMAT"):
            if each.opname == "FORMAT_WITH_SPEC" or (each.opname == "FORMAT_VALUE" and each.arg & 4):
                words.pop()
            words.append("...")
    return "".join(words)


NOTHING = ("NOP", "NOT_TAKEN", "EXTENDED_ARG", "PUSH_NULL", "PRECALL", "CACHE")
BUILDS = (  # how the instructions begin that make an error and its words
    "LOAD_GLOBAL", "LOAD_CONST", "LOAD_FAST", "LOAD_DEREF", "LOAD_ATTR", "LOAD_METHOD", "LOAD_SMALL_INT", "FORMAT_",
    "CONVERT_VALUE", "BUILD_", "BINARY_", "COMPARE_OP", "CALL", "KW_NAMES", *NOTHING,
)  # fmt: skip


def named_error(tx: Any, name: str) -> type[Exception] | None:
    """The error that a name stands for."""
    found = tx.f_globals.get(name, getattr(builtins, name, None))
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def says_words(error: type[Exception]) -> bool:
    """Whether an error is made of its words, as those of Python are, and those that add nothing to them."""
    own = [vars(kind) for kind in error.__mro__ if kind.__module__ != builtins.__name__]
    return not any("__init__" in names or "__new__" in names for names in own)


def is_assertion(tx: Any, jump: Any) -> bool:
    """Whether it is the jump of an `assert` that Dynamo keeps: of `assert x`, and not of `assert not x`."""
    return following(tx, jump).opname in ASSERTION and str(jump.opname).endswith("IF_TRUE")


def may_catch(tx: Any, error: type[Exception]) -> bool:
    """Whether a frame may catch such an error where it is now. A `with` of torch's settings does not. (Before Python
    3.11, true of any other block.)"""
    plain = [block.target for block in tx.block_stack if is_setting(block.with_context)]
    if sys.version_info < (3, 11):
        return len(plain) < len(tx.block_stack)
    entry = tx.current_instruction.exn_tab_entry
    while entry is not None:
        handler = tx.indexof[entry.target]
        left = tx.instructions[handler:]
        again = next(filter(is_raised_again, left), None) if entry.target in plain else raised_again(tx, handler, error)
        if again is None:
            return True
        entry = again.exn_tab_entry
    return False


def is_setting(context: Any) -> bool:
    """Whether a block is a `with` of what Dynamo knows, such as autocast."""
    return context is not None and not isinstance(context, GenericContextWrappingVariable)


def is_raised_again(instruction: Any) -> bool:
    """Whether it raises the error that is being handled."""
    return str(instruction.opname) == "RERAISE"


def raised_again(tx: Any, place: int, error: type[Exception]) -> Any:
    """The instruction that raises the error again, of a block that handles errors and begins at `place`; None where it
    may do something else."""
    names = list[str]()
    while place < len(tx.instructions):
        each = tx.instructions[place]
        if is_raised_again(each):
            return each
        if each.opname == "CHECK_EXC_MATCH":
            caught = tuple(named_error(tx, name) or Exception for name in names)
            jump = following(tx, each)
            if not caught or issubclass(error, caught) or not leads_on(jump, "FALSE"):
                return None
            place, names = tx.indexof[jump.target], []
            continue
        dropped = each.opname == "POP_EXCEPT" and not is_raised_again(following(tx, each))
        if dropped or each.opcode in (*JUMP_OPCODES, *TERMINAL_OPCODES):
            return None
        if each.opname.startswith("LOAD_"):
            names.append(each.argval if each.opname == "LOAD_GLOBAL" else "")  # of others it is not known what they are
        place += 1
    return None


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

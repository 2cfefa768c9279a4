"""Where the jumps of a frame lead, and which of its names are read later."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch._dynamo.bytecode_transformation import cleaned_instructions

from ringopt.torch_compat.dynamo_bytecode import (
    Raise,
    end_of_or,
    following,
    is_assertion,
    jumps_by_truth,
    live_at,
    may_catch,
    raised_by,
    way_to_go,
)


def frame(program: Callable[..., Any]) -> tuple[Any, list[Any]]:
    """What a translator knows of it, and its jumps that go one of two ways."""
    instructions = cleaned_instructions(program.__code__)
    tx = SimpleNamespace(instructions=instructions, indexof={each: at for at, each in enumerate(instructions)})
    tx.f_globals, tx.block_stack = program.__globals__, []
    return tx, [each for each in instructions if jumps_by_truth(each)]


def one(a: Any, b: Any, c: Any) -> Any:
    if a:
        b = c
    return b


def skips(a: Any, b: Any, c: Any) -> Any:
    for c in b:
        if a:
            continue
        b = c
    return b


def either(a: Any, b: Any, c: Any) -> Any:
    if a or b or c:
        b = c
    return b


def within(a: Any, b: Any, c: Any) -> Any:
    if c and (a or b):
        b = c
    return b


def both(a: Any, b: Any, c: Any) -> Any:
    if a and b:
        b = c
    return b


def mixed(a: Any, b: Any, c: Any) -> Any:
    if a or (b and c):
        b = c
    return b


def value(a: Any, b: Any, c: Any) -> Any:
    return a or b or c


@pytest.mark.parametrize(("program", "ends"), [(either, [2, 2, None]), (within, [None, 2, None])])
def test_the_parts_of_a_condition_end_at_one_jump(program: Callable[..., Any], ends: list[int | None]) -> None:
    tx, jumps = frame(program)
    assert [end_of_or(tx, jump) for jump in jumps] == [None if at is None else jumps[at] for at in ends]


@pytest.mark.parametrize("program", [one, skips, both, mixed, value])
def test_other_jumps_are_no_such_parts(program: Callable[..., Any]) -> None:
    tx, jumps = frame(program)
    assert [end_of_or(tx, jump) for jump in jumps] == [None] * len(jumps)


@pytest.mark.parametrize(("program", "truth"), [(one, True), (skips, False)])
def test_the_way_that_does_something(program: Callable[..., Any], truth: bool) -> None:
    """The other one is where both go on."""
    tx, (jump,) = frame(program)
    taken, ends = way_to_go(tx, jump)
    assert taken is truth
    assert following(tx, jump) in ends or jump.target in ends


def test_names_that_are_read_later() -> None:
    tx, (jump,) = frame(one)
    assert live_at(tx.instructions, jump) == {"b", "c"} and live_at(tx.instructions, jump.target) == {"b"}


@pytest.mark.parametrize("condition, kept", [("a", True), ("not a", False)])
def test_assertions_that_dynamo_keeps_and_others(condition: str, kept: bool) -> None:
    space: dict[str, Any] = {}
    exec(f"def program(a):\n    assert {condition}, 'words'", space)  # which pytest does not rewrite
    tx, (jump,) = frame(space["program"])
    assert is_assertion(tx, jump) == kept
    assert raised_by(tx, jump) == Raise(not kept, AssertionError, "words")


class OtherError(ValueError):
    """Of a program."""


class NumberedError(ValueError):
    """Which is made of more than its words."""

    def __init__(self, words: str) -> None:
        super().__init__(words, 1)


def raising(a: Any, b: Any, c: Any) -> Any:
    if a:
        raise ValueError("a is there")
    if not b or c:
        raise KeyError
    if c:
        raise TypeError(f"{a!r:>4} of {b} is none")
    if a:
        raise OtherError("its own")
    if a:
        raise NumberedError("numbered")
    if a:
        raise OSError(2, "no file")
    if a:
        raise ValueError.a("of a class")
    if a:
        raise c(ValueError)
    if a:
        raise ValueError("a") from c
    if b:
        raise ValueError("a" if a else "b")
    if c:
        b = c
        raise ValueError
    return b


def test_which_jumps_lead_to_an_error_alone() -> None:
    tx, jumps = frame(raising)
    found = [raised_by(tx, jump) for jump in jumps]
    assert found[:5] == [
        Raise(True, ValueError, "a is there"),
        Raise(False, KeyError, ""),
        Raise(True, KeyError, ""),
        Raise(True, TypeError, "... of ... is none"),
        Raise(True, OtherError, "its own"),
    ]
    assert found[5:] == [None] * len(found[5:]) and len(found) > 11


def shadowed(a: Any, ValueError: Any) -> None:
    if a:
        raise ValueError("another")


def test_a_local_name_is_no_error_that_is_known() -> None:
    tx, (jump,) = frame(shadowed)
    assert raised_by(tx, jump) is None


def handled(a: Any, b: Any, c: Any) -> Any:
    try:
        try:
            if a:
                raise ValueError
        except (TypeError, KeyError):
            b = c
    finally:
        c = b
    return c


def caught(a: Any, b: Any, c: Any) -> Any:
    try:
        try:
            if a:
                raise ValueError
        except KeyError:
            b = c
    except (TypeError, ValueError):
        c = b
    return c


def caught_by_another_name(a: Any, b: Any, c: Any) -> Any:
    try:
        if a:
            raise ValueError
    except (KeyError, b):
        c = b
    return c


def suppressed(a: Any, b: Any, c: Any) -> Any:
    with b:
        if a:
            raise ValueError
    return c


def given_up(a: Any, b: Any, c: Any) -> Any:
    while b:
        try:
            if a:
                raise ValueError
        finally:
            break  # noqa: B012
    return c


CATCHING = [caught, caught_by_another_name, suppressed, given_up]


@pytest.mark.parametrize("program, may", [(raising, False), (handled, False), *((each, True) for each in CATCHING)])
def test_whether_a_frame_may_catch_an_error(program: Callable[..., Any], may: bool) -> None:
    tx, jumps = frame(program)
    tx.current_instruction = next(jump for jump in jumps if jump.argval is not None and raised_by(tx, jump))
    assert may_catch(tx, ValueError) == may

"""The arithmetic that texts of a file may hold, and nothing besides."""

from __future__ import annotations

import pytest

from ringopt.frontend.pt2.expressions import NoArithmetic, check_size


@pytest.mark.parametrize("text", ["Float('1.5')", "Float('-.25', precision=53)", "Mul(Float('3e-05'), Integer(2))"])
def test_a_float_is_digits(text: str) -> None:
    """As sympy's `srepr` writes one."""
    check_size(text)


@pytest.mark.parametrize("digits", ["x", "", "__import__('os')", "1.5 + 1", "nan", "1e1000000000"])
def test_a_float_of_anything_else_is_refused(digits: str) -> None:
    """No other text reaches sympy, nor an exponent of more than three digits."""
    with pytest.raises(NoArithmetic):
        check_size(f"Float({digits!r}, precision=53)")

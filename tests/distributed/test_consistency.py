"""Digests by which ranks compare what they hold."""

from __future__ import annotations

from ringopt.distributed.consistency import WORDS, digest


def test_all_words_of_a_digest_are_of_the_hash() -> None:
    """Of 64 bits each, and other ones for other bytes: what is compared is 256 bits."""
    one, other = digest(b"one"), digest(b"other")
    assert one == digest(b"one") and len(one) == len(other) == WORDS
    assert all(a != b for a, b in zip(one, other, strict=True))
    assert all(abs(word) > 2**40 for word in (*one, *other)), "no word is filled up with zeros"

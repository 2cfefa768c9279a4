"""Symbolic expressions over (b, h, q, k): masks and scores, element by element. Knows no FX graph."""

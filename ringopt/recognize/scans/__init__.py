"""Recurrences found in a flat graph: loops that were unrolled, scan operators, sums with decays."""

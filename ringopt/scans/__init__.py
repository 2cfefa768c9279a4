"""Recurrences: the body of a scan as data, the call of the operator, and the proof that a step is affine."""

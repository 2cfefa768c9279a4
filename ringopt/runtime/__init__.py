"""Wrappers of a compiled call: graph boundaries, checks of inputs, mask guards, verification, traces."""

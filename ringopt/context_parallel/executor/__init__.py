"""Runs plans: posts messages, computes blocks, waits, merges by log-sum-exp, drops buffers."""

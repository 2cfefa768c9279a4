"""Propagates sharding from attention over the whole graph."""

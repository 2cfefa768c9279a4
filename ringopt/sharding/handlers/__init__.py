"""Operators that mix tokens, computed on shards: one file a family; `registry.py` lists them."""

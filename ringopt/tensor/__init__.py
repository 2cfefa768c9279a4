"""Whole tensors of which a rank holds its shard."""

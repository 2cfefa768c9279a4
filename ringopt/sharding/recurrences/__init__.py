"""Recurrences on shards: which way ranks share each, and what takes its place."""

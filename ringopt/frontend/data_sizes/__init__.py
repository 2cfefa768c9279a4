"""Sizes that data decide, as of tokens for an expert: captured, and taken out of the graph."""

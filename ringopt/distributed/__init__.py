"""Meshes of ranks, and how tensors move between them."""

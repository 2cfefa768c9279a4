"""Attention in any spelling: candidates, their reading as expressions, and the proof."""

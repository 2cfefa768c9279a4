"""Patterns, layouts, exchange plans, their proof, and the executor that runs them."""

"""Dilated attention: segments that lie within a rank whole, and terms of kept tokens that are cut over ranks."""

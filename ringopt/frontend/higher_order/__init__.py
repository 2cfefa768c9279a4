"""Higher-order operators whose graphs are read."""

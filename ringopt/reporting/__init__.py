"""Figures of a compiled graph; reports and diffs as HTML files; what option `dump` writes."""

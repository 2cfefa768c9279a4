"""The tables of `ringopt bench`, one file a table: `add` describes it to argparse, `measure` gives its `Result`.

A new table is such a file and a line in tools/bench.py.
"""

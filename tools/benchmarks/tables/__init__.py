"""The tables of `ringopt bench`, one a file."""

"""One command a file, all behind the console script `ringopt`."""

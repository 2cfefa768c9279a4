"""What the ranks of a table's measurement run."""

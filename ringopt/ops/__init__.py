"""The `ringopt::` operators that compiled graphs call."""

"""What a plan costs in time, bytes and memory: predicted, never executed."""

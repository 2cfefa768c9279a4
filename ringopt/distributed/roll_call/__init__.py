"""Whether all ranks begin the same, with the same inputs, told in one short message before any other of a call."""

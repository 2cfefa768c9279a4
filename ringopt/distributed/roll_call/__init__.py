"""Whether all ranks begin the same, with the same inputs, in one short message before any other of a call."""

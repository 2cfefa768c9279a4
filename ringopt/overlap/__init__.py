"""The order of communication in compiled graphs: the same on all ranks, started early, within a bound."""

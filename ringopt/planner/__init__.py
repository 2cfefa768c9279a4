"""What a step will cost at any size, from traces at small ones."""

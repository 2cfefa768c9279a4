"""What several commands share: their errors and output, and the memory of a process."""

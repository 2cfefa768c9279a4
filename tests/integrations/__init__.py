"""Other libraries, each with its own trainer, on ranks and on one process."""

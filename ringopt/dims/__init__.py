"""Which dim of an operator's output is which dim of its inputs."""

"""Two programs side by side: views of their nodes, what the nodes mean, and `ringopt.diff`."""

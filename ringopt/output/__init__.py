"""What leaves the process: text for terminals and pages, and files written during a training."""

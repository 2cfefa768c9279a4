"""What leaves the process: text for terminals and pages, and files that a training leaves beside its work."""

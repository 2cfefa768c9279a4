"""FX graph helpers: terms of masks, axes of tensors, placements, printing. Knows no process, kernel or exchange."""

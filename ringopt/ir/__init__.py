"""Facts about FX graphs: nodes, placements, symbolic sizes, refusals, printing. Knows no process, kernel or plan."""

"""What leaves the process: text for terminals and pages, and files written during a training.

How it is written, in five lines:

- What happened, why, what to do; with the module and the line of the user's program.
- It says who speaks, once, from one rank; what only one rank knows, that rank says. What nobody asked for is one line.
- Numbers have units and at most three digits. "Replicated" and "100%" are said only where they hold for all of it.
- The terms are those of PyTorch's documentation; words that only this project uses stay in ARCHITECTURE.md.
- Standard output has what was asked for, standard error progress and warnings. Text of programs is made `printable`.
"""

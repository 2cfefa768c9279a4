"""Loops of a program that are recurrences, traced as one turn."""

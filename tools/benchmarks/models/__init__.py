"""Models and attention spellings that tables measure."""

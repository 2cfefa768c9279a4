"""What of the pages is drawn or generated: a picture, parts of REFERENCE.md, the notebook of the tutorial."""

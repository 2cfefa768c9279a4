"""Which tokens a rank holds, and which keys a query sees: rows, layouts, attention patterns."""

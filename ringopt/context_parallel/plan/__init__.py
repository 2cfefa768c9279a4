"""Who sends what to whom and when, as immutable data that is proved before it runs."""

"""Where things live in a model: one row for each architecture. No other folder knows the names inside a model."""

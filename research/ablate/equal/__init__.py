"""`research.ablate text --equal-time`: the routed model against the strongest dense one, at equal wall-clock time."""

"""`research.budget`: the best byte model for a budget of seconds, every family at its best."""

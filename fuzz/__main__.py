"""python -m fuzz."""

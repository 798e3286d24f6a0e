"""Attacks on onepass with fresh seeds: `python -m fuzz --help`, or `make fuzz MINUTES=10`."""

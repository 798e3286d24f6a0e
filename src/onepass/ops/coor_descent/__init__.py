"""Coordinate descent towards a soft top-k, T steps; see README.md in this folder."""

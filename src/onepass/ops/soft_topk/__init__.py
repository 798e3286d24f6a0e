"""Differentiable top-k: gates that sum to k in every row; see README.md in this folder."""

"""Differentiable top-k: coor_descent, soft_topk, topk; see README.md in this folder."""

"""Experiments: evidence for what the library claims, run from a copy of the repository, no part of the package."""

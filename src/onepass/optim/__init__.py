"""Optimizers."""

from onepass.optim.lion import Lion

__all__ = ["Lion"]

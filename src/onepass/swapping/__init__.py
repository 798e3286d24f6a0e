"""`onepass.swap`: exchange the norms of a model for those of `onepass.nn`, and back."""

from .report import Layer, SwapReport
from .swap import swap

__all__ = ["Layer", "SwapReport", "swap"]

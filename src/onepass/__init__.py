"""PyTorch operators that pass over memory once, and the conditional computation they exist for."""

from onepass.ops.weighted_sum.op import weighted_sum

__version__ = "0.1.0"

__all__ = ["__version__", "weighted_sum"]

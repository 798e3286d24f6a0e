"""Modules over the operators; names, arguments and state_dict keys are `torch.nn`'s where torch has the same thing."""

from .norm import LayerNorm, RMSNorm
from .routed import Routed, RoutedFeedForward
from .router import Router, RouterOutput
from .weighted_sum import WeightedSum

__all__ = ["LayerNorm", "RMSNorm", "Routed", "RoutedFeedForward", "Router", "RouterOutput", "WeightedSum"]

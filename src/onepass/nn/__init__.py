"""Modules over the operators; names, arguments and state_dict keys follow `torch.nn` where it has an equivalent."""

from .attention import AttentionRouting, RoutedAttention
from .block import BlockRouting, RoutedBlock
from .causal import CausalRouter
from .cross_attention import RoutedCrossAttention
from .decoder import Decoder
from .experts import ExpertRouting, Experts, load_balancing_loss, router_z_loss, update_balance
from .graphed import graphed
from .local_attention import LocalAttention
from .norm import LayerNorm, RMSNorm
from .routed import Routed, RoutedFeedForward
from .router import Router, RouterOutput
from .stats import routing_stats
from .transformer import TransformerBlock
from .weighted_sum import WeightedSum

__all__ = [
    "AttentionRouting", "BlockRouting", "CausalRouter", "Decoder", "ExpertRouting", "Experts", "LayerNorm",
    "LocalAttention", "RMSNorm", "Routed", "RoutedAttention", "RoutedBlock", "RoutedCrossAttention",
    "RoutedFeedForward", "Router", "RouterOutput", "TransformerBlock", "WeightedSum", "graphed", "load_balancing_loss",
    "router_z_loss", "routing_stats", "update_balance",
]  # fmt: skip

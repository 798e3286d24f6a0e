"""Layers × contracts: every module of `onepass.nn`, how it is built and called, and what it takes.

`test_contracts.py` asks all of them the same; a layer's own file has its formula and what only that layer does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import onepass.nn as onn

DIM, N, WINDOW = 32, 40, 8
HEADS: dict[str, Any] = {"heads": 2, "dim_head": 16}
LOCAL: dict[str, Any] = {**HEADS, "window": WINDOW}


class Layer(NamedTuple):
    """`build(**factory)` makes it. What it `takes`: a mask, cu_seqlens (packed), and shares as k (shares).

    `width`: of the memories of cross-attention. `k`: it is called as a router. `in_order`: its constructor draws
    parameters in the order of `modules()`. `keeps`: under autocast y has the dtype of x.
    """

    name: str
    build: Callable[..., nn.Module]
    takes: str = ""
    width: int | None = None
    k: float | None = None
    in_order: bool = True
    keeps: bool = False


class Called(nn.Module):
    """A layer with the call that all have: forward(x, mask, return_routing=False, **packed)."""

    def __init__(self, spec: Layer, **factory: Any) -> None:
        super().__init__()
        self.spec, self.layer = spec, spec.build(**factory)

    def forward(self, x: Tensor, mask: Tensor | None = None, return_routing: bool = False, **packed: Any) -> Any:
        spec, arguments = self.spec, [x]
        if spec.k is not None:
            out = self.layer(x, spec.k, mask, **packed)
            return (out.gates, out) if return_routing else out.gates
        if spec.width is not None:
            arguments.append(_turned(x)[..., : spec.width])
        if "mask" in spec.takes:
            arguments.append(mask)
        if spec.width is not None:
            arguments.append(_turned(mask) if isinstance(mask, Tensor) else mask)
        if not return_routing or "routing" not in spec.takes:
            y = self.layer(*arguments, **packed)
            return (y, None) if return_routing else y
        return self.layer(*arguments, return_routing=True, **packed)


class Scale(nn.Module):
    """A branch's buffer, which `distribute_module` makes a DTensor."""

    def __init__(self, **factory: Any) -> None:
        super().__init__()
        self.register_buffer("by", torch.empty(DIM, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.by.copy_(torch.linspace(1, 2, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def _turned(t: Tensor) -> Tensor:
    """The tokens in another order: the memories of cross-attention. torch 2.11 flips no DTensor."""
    return torch.cat([t[:, 1:], t[:, :1]], 1)


def _routed(**f: Any) -> nn.Module:
    light = nn.Linear(DIM, DIM, **f)
    return onn.Routed(light, nn.Sequential(nn.Linear(DIM, DIM, **f), Scale(**f)), onn.Router(DIM, **f), k=0.25)


def _own_routers(**f: Any) -> nn.Module:
    """Routers made by the caller, before the module draws its own parameters."""
    q, kv = (onn.Router(DIM, kind="sigmoid", gate="straight_through", **f) for _ in range(2))
    return onn.RoutedAttention(DIM, 0.25, 0.5, router_q=q, router_kv=kv, **LOCAL, **f)


def _causal_feed_forward(**f: Any) -> nn.Module:
    return onn.RoutedFeedForward(DIM, 0.25, router=onn.CausalRouter(DIM, block=WINDOW, memory=16, **f), **f)


MASK, ROUTED = "mask", "mask routing"
TABLE = [
    Layer("LayerNorm", lambda **f: onn.LayerNorm(DIM, **f)),
    Layer("LayerNorm stable", lambda **f: onn.LayerNorm((N, DIM), bias=False, stable=True, **f)),
    Layer("LayerNorm without weights", lambda **f: onn.LayerNorm(DIM, elementwise_affine=False, **f)),
    Layer("RMSNorm", lambda **f: onn.RMSNorm(DIM, **f)),
    Layer("RMSNorm without weight", lambda **f: onn.RMSNorm(DIM, elementwise_affine=False, eps=1e-3, **f)),
    Layer("WeightedSum", lambda **f: onn.WeightedSum(DIM, **f)),
    Layer("WeightedSum by three", lambda **f: onn.WeightedSum(DIM, 3, **f)),
    Layer("Router", lambda **f: onn.Router(DIM, **f), "packed", k=0.25),
    Layer("Router of three", lambda **f: onn.Router(DIM, 3, kind="sigmoid", gate="straight_through", **f), k=5),
    Layer("CausalRouter", lambda **f: onn.CausalRouter(DIM, block=WINDOW, memory=16, **f), "packed", k=0.25),
    Layer("Experts", lambda **f: onn.Experts(DIM, 4, **f), MASK, keeps=True),
    Layer("Experts shared", lambda **f: onn.Experts(DIM, 4, activation="swiglu", shared_dim=8, **f), MASK, keeps=True),
    Layer("LocalAttention", lambda **f: onn.LocalAttention(DIM, **LOCAL, **f), MASK),
    Layer("LocalAttention causal", lambda **f: onn.LocalAttention(DIM, causal=True, **LOCAL, **f), MASK),
    Layer("Routed", _routed, f"{ROUTED} packed shares"),
    Layer("RoutedFeedForward", lambda **f: onn.RoutedFeedForward(DIM, 0.25, **f), f"{ROUTED} packed shares"),
    Layer("RoutedFeedForward causal", _causal_feed_forward, f"{ROUTED} packed shares", in_order=False),
    Layer(
        "RoutedFeedForward by three", lambda **f: onn.RoutedFeedForward(DIM, 5, bias=False, router=onn.Router(
            DIM, 3, **f), **f), ROUTED, in_order=False),
    Layer("RoutedAttention", lambda **f: onn.RoutedAttention(DIM, 0.25, 0.25, **LOCAL, **f), f"{ROUTED} packed shares"),
    Layer(
        "RoutedAttention causal", lambda **f: onn.RoutedAttention(DIM, 0.25, 0.5, causal=True, light_heads=1, **LOCAL,
                                                                  **f), f"{ROUTED} packed shares"),
    Layer("RoutedAttention with routers", _own_routers, f"{ROUTED} packed shares", in_order=False),
    Layer("RoutedCrossAttention", lambda **f: onn.RoutedCrossAttention(DIM, 0.25, 0.25, **HEADS, **f), ROUTED, DIM),
    Layer(
        "RoutedCrossAttention narrow", lambda **f: onn.RoutedCrossAttention(DIM, 4, 0.5, dim_context=24, **HEADS, **f),
        ROUTED, 24),
    Layer("RoutedBlock", lambda **f: onn.RoutedBlock(DIM, 0.25, **LOCAL, **f), f"{ROUTED} packed shares", keeps=True),
    # the feed-forward's router is drawn before its branches
    Layer(
        "RoutedBlock causal", lambda **f: onn.RoutedBlock(DIM, 0.25, causal=True, **LOCAL, **f),
        f"{ROUTED} packed shares", in_order=False, keeps=True),
    Layer("TransformerBlock", lambda **f: onn.TransformerBlock(DIM, **HEADS, **f), "mask packed", keeps=True),
    Layer(
        "TransformerBlock causal", lambda **f: onn.TransformerBlock(DIM, causal=True, hidden_dim=8, **LOCAL, **f),
        "mask packed", keeps=True),
    Layer(
        "TransformerBlock of experts", lambda **f: onn.TransformerBlock(
            DIM, window=WINDOW, num_experts=4, hidden_dim=8, **HEADS, **f), f"{ROUTED} packed", keeps=True),
]  # fmt: skip


def those(takes: str = "", *, without: str = "-") -> pytest.MarkDecorator:
    """Parametrize by the layers that take all of this, whose names hold no word of `without`."""
    chosen = [s for s in TABLE if {*takes.split()} <= {*s.takes.split()}]
    chosen = [s for s in chosen if not {*without.split()} & {*s.name.split()}]
    return pytest.mark.parametrize("spec", chosen, ids=[s.name for s in chosen])


def made(spec: Layer, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Called:
    torch.manual_seed(2)
    return Called(spec).to(device, dtype)

"""What modules refuse, and the words by which they name it: the argument, what was given, what is accepted."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import nn

from onepass import expert_order
from onepass.nn import (
    CausalRouter,
    Experts,
    LayerNorm,
    LocalAttention,
    RMSNorm,
    Routed,
    RoutedAttention,
    RoutedBlock,
    RoutedCrossAttention,
    RoutedFeedForward,
    Router,
    TransformerBlock,
    WeightedSum,
    load_balancing_loss,
    router_z_loss,
    routing_stats,
    update_balance,
)

X, LINEAR, WIDE = torch.ones(2, 9, 16), nn.Linear(16, 16), nn.Linear(16, 32)
HEADS: dict[str, Any] = {"heads": 2, "dim_head": 8}
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "LocalAttention": lambda: LocalAttention(16, **HEADS),
    "Routed": lambda k=3, **o: Routed(LINEAR, LINEAR, Router(16), k, **o),
    "RoutedFeedForward": lambda k=3, **o: RoutedFeedForward(16, k, **o),
    "RoutedAttention": lambda k=3, **o: RoutedAttention(16, k, 4, **HEADS, **o),
    "RoutedBlock": lambda k=3, **o: RoutedBlock(16, k, **HEADS, **o),
    "TransformerBlock": lambda **o: TransformerBlock(16, **HEADS, **o),
}


def cross(**options: Any) -> RoutedCrossAttention:
    return RoutedCrossAttention(16, 2, 3, dim_context=8, **HEADS, **options)


def on_meta(layer: nn.Module, part: str) -> nn.Module:
    layer.get_submodule(part).to("meta")
    return layer


CHOICE = Router(16)(X, 4)
OPTIONS: list[Any] = [{"causal": True, "window": n, **HEADS, "heads": m} for n, m in ((4, 2), (8, 2), (4, 1))]
BLOCKS = [[RoutedBlock(16, 0.5, **options), TransformerBlock(16, **options)] for options in OPTIONS]
ROWS: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    # layers
    *((ValueError, f"{type(block).__name__}: cache and cu_seqlens exclude each other",
       lambda block=block: block(X[0], cu_seqlens=torch.tensor([0, 9]), cache=block.new_cache(1)))
      for block in BLOCKS[0]),
    *((ValueError, f"{type(block).__name__}: cache must be what its own new_cache returned, with window 4, .*; got w",
       lambda block=block, other=other: block(X[:, :1], cache=other.new_cache(2)))
      for others in (BLOCKS[1], BLOCKS[2], BLOCKS[0][::-1], [RoutedBlock(16, 0.5, k_kv=0.5, **OPTIONS[0])])
      for block, other in zip(BLOCKS[0], others, strict=False)),
    *((TypeError, "cache must be what its own new_cache returned, .*; got dict", lambda block=block: block(X, cache={}))
      for block in BLOCKS[0]),
    *((ValueError, r"Block: mask must be \(batch, n\) = \(2, 9\), got \(2, 8\)",
       lambda block=block: block(X, X[:, 1:, 0] > 0, cache=block.new_cache(2))) for block in BLOCKS[0]),
    *((TypeError, f"{type(block).__name__}: the cache is torch.float64 and the weights are torch.float32; convert one",
       lambda block=block: block(X[:, :1], cache=block.new_cache(2).double())) for block in BLOCKS[0]),
    *((error, f"{name}: k(_q)? must be an int", lambda name=name, k=k: LAYERS[name](k))
      for name in ("Routed", "RoutedFeedForward", "RoutedAttention")
      for k, error in ((0, ValueError), (0.0, ValueError), (1.5, ValueError), (True, TypeError), ("3", TypeError))),
    *((error, "must be an int", lambda k=k: LAYERS["RoutedBlock"](k))
      for k, error in ((-1, ValueError), (0, ValueError), (1.5, ValueError), ("3", TypeError), (None, TypeError))),
    *((error, "RoutedAttention: k_kv must be an int", lambda k=k: RoutedAttention(16, 1, k))
      for k, error in ((-1, ValueError), (1.5, ValueError), (True, TypeError), ("3", TypeError))),
    *((TypeError, rf"^{name}: unexpected argument {wrong}{said}",
       lambda name=name, wrong=wrong: LAYERS[name](**{wrong: True}))
      for name in ("Routed", "RoutedFeedForward", "RoutedBlock")
      for wrong, said in (("balance", "; it went with rows over several"), ("windows", "$"))),
    *((ValueError, r"x must be \(batch, n, (16|dim)\), got \(9, 16\)", lambda name=name: LAYERS[name]()(X[0]))
      for name in ("RoutedFeedForward", "RoutedAttention", "RoutedBlock", "TransformerBlock")),
    *((ValueError, "weight is on meta but x is on cpu",
       lambda name=name, part=part: on_meta(RoutedBlock(16, 3, **HEADS).get_submodule(name), part)(X))
      for name in ("attention", "feed_forward") for part in ("", "light.norm", "heavy")),
    (TypeError, "RoutedAttention: x must be a tensor, got str", lambda: LAYERS["RoutedBlock"]()("abc")),
    (TypeError, "update_balance: expert_bias must be float32, got torch.bfloat16; write",
     lambda: update_balance(nn.Module._apply(Experts(16, 4), torch.Tensor.bfloat16))),
    (NotImplementedError, "RoutedAttention: is_grads_batched=True",
     lambda: torch.autograd.functional.jacobian(LAYERS["RoutedAttention"](), X, vectorize=True)),
    (ValueError, "dropout must be between 0 and 1", lambda: LAYERS["RoutedBlock"](dropout=1.5)),
    (ValueError, r"light branch must keep the shape \(2, 9, 16\), got \(2, 9, 32\)",
     lambda: Routed(WIDE, LINEAR, Router(16), 3)(X)),
    (ValueError, r"heavy branch must keep the shape \(2, 3, 16\), got \(2, 3, 32\)",
     lambda: Routed(LINEAR, WIDE, Router(16), 3)(X)),
    *((error, f"RoutedFeedForward: light_mult {match}", lambda mult=mult: RoutedFeedForward(16, 3, light_mult=mult))
      for mult, error, match in ((0.01, ValueError, r"= 0\.01 of dim 16 leaves a hidden width of 0\.16; it must be"),
        (nan, ValueError, "= nan of dim 16 leaves a hidden width of nan"),
        (inf, ValueError, "= inf of dim 16 leaves a hidden width of inf"),
        ("2", TypeError, "must be a number, got str"))),
    *((error, match, lambda options=options: RoutedAttention(16, 1, 1, **options)) for options, error, match in (
        ({"heads": 0}, ValueError, "heads must be ≥ 1"), ({"light_heads": 0}, ValueError, "heads must be ≥ 1"),
        ({"dim_head": 5}, ValueError, "dim_head must be even"), ({"window": 0}, ValueError, "window must be ≥ 1"),
        ({"window": 2.5}, TypeError, "window must be an int, got float"))),
    *((ValueError, f"{kind.__name__}: {name} must have one route, got num_routes = 2",
       lambda kind=kind, name=name: kind(16, 4, 4, **{name: Router(16, num_routes=2)}))
      for kind in (RoutedAttention, RoutedCrossAttention) for name in ("router_q", "router_kv")),
    *((ValueError, r"context must be \(2, m, 8\), got", lambda shape=shape: cross()(X, torch.ones(shape)))
      for shape in ((2, 33, 16), (3, 33, 8), (33, 8))),
    (TypeError, "dim_context must be an int, got str", lambda: RoutedCrossAttention(8, 1, 1, dim_context="8")),
    *((error, f"(TransformerBlock|Experts): {match}", lambda options=options: TransformerBlock(100, **options))
      for options, error, match in (
        ({}, ValueError, "dim must be a multiple of dim_head where heads is not given, got dim = 100 and"),
        ({"window": 0, "heads": 2}, ValueError, "window must be ≥ 1, got 0"),
        ({"dim_head": 5}, ValueError, "dim_head must be even"),
        ({"dim_head": 10, "hidden_dim": 0}, ValueError, "hidden_dim must be ≥ 1, got 0"),
        ({"dim_head": 10, "num_experts": -1}, ValueError, "num_experts must be ≥ 0, got -1"),
        ({"dim_head": 10, "num_experts": 2, "top_k": 3}, ValueError, "top_k must be ≤ num_experts = 2, got 3"),
        ({"dim_head": 10, "causal": 1}, TypeError, "causal must be a bool, got int"),
        ({"dim_head": 10, "dropout": 2}, ValueError, "dropout must be between 0 and 1, got 2"))),
    *((error, f"Experts: {match}", lambda options=options: Experts(**{"dim": 8, "num_experts": 2} | options))
      for options, error, match in (({"dim": 8.0}, TypeError, "dim must be an int, got float"),
        ({"num_experts": 0}, ValueError, "num_experts must be ≥ 1, got 0"),
        ({"activation": "relu"}, ValueError, "activation must be one of .*got 'relu'"),
        ({"score_func": "top"}, ValueError, "score_func must be one of .*got 'top'"),
        ({"balance_rate": -1}, ValueError, "balance_rate must be a finite number ≥ 0, got -1"),
        ({"shared_dim": -1}, ValueError, "shared_dim must be ≥ 0, got -1"))),
    (ValueError, r"Experts: x must be \(…, dim = 16\), got \(2, 9, 4\)", lambda: Experts(16, 2)(X[..., :4])),
    *((TypeError, rf"{loss.__name__}: routing must be layer\(x, return_routing=True\)\[1\], got Tensor",
       lambda loss=loss: loss(X)) for loss in (load_balancing_loss, router_z_loss)),
    (ValueError, "order: num_experts must be ≥ 1, got 0", lambda: expert_order(torch.zeros(2, 2).int(), 0)),
    # routers
    (ValueError, "dim must be ≥ 1, got 0", lambda: Router(0)),
    (ValueError, "num_routes must be ≥ 1 and ≤ 16, got 17", lambda: Router(8, 17)),
    *((ValueError, f"eps must be a finite number > 0, got {x}", lambda x=x: Router(8, eps=x)) for x in (0.0, inf)),
    (ValueError, "kind must be one of capped_exp.*got 'hard'", lambda: Router(8, kind="hard")),
    (TypeError, "Router: unexpected argument score; scores are", lambda: Router(8, score="cosine")),
    *((TypeError, f"CausalRouter: unexpected argument {name}$", lambda name=name: CausalRouter(8, **{name: 2}))
      for name in ("memories", "num_routes", "kind", "gate", "explore")),
    (ValueError, "gate must be one of soft, straight_through; got 'none'", lambda: Router(8, gate="none")),
    (ValueError, "explore must be a finite number ≥ 0, got -1", lambda: Router(8, explore=-1)),
    (ValueError, "explore must be a finite number ≥ 0, got nan", lambda: Router(8, explore=nan)),
    (TypeError, "Router: dim must be an int, got float", lambda: Router(8.0)),
    (TypeError, "Router: num_routes must be an int, got str", lambda: Router(8, "2")),
    (TypeError, "Router: eps must be a number, got Tensor", lambda: Router(8, eps=torch.ones(()))),
    (TypeError, "Router: explore must be a number, got NoneType", lambda: Router(8, explore=None)),
    (TypeError, "CausalRouter: block must be an int, got float", lambda: CausalRouter(8, block=2.0)),
    (TypeError, "CausalRouter: memory must be an int, got NoneType", lambda: CausalRouter(8, memory=None)),
    *((ValueError, r"CausalRouter: (block|memory) must be", lambda options=options: CausalRouter(16, **options))
      for options in ({"block": 0}, {"block": 8, "memory": 12}, {"block": 8, "memory": 0})),
    *((error, match, lambda args=args: Router(16)(*args)) for args, error, match in (
        ((X[0], 1), ValueError, r"x must be \(batch, n, 16\), got \(9, 16\)"),
        ((X[..., 1:], 1), ValueError, r"got \(2, 9, 15\)"), ((X.long(), 1), TypeError, "int64"),
        ((X, 1.5), ValueError, "an int ≥ 0 or a share 0 < k ≤ 1 of the real tokens, got 1.5"),
        ((X, "1"), TypeError, "k must be an int or a float, got str"),
        ((X, True), TypeError, "k must be an int or a float, got bool"),
        ((X, -1), ValueError, "k must be an int ≥ 0 or a share.*, got -1"),
        ((X, 1, torch.ones(2, 9)), TypeError, "mask must be bool.*float32"),
        ((X, 1, [True]), TypeError, "mask must be a tensor"))),
    # statistics of choices
    (TypeError, "routing must be a RouterOutput, AttentionRouting or BlockRouting, got Tensor",
     lambda: routing_stats([[X]])),
    (TypeError, "routing_stats: mask must be bool", lambda: routing_stats([[CHOICE]], [torch.ones(2, 9)])),
    (ValueError, r"routing_stats: mask must be \(batch, n\) = \(2, 9\), got \(2, 8\)",
     lambda: routing_stats([[CHOICE]], [torch.ones(2, 8).bool()])),
    (ValueError, "masks must be one for each of 1 passes, got 0", lambda: routing_stats([[CHOICE]], [])),
    # norms and sums
    *((error, f"{kind.__name__}: normalized_shape {match}", lambda kind=kind, shape=shape: kind(shape))
      for kind in (LayerNorm, RMSNorm) for shape, error, match in (
        ("a", TypeError, "must be an int or a sequence of ints, got 'a'"),
        (4.0, TypeError, "must be an int or a sequence of ints, got 4.0"),
        (None, TypeError, "must be an int or a sequence of ints, got None"),
        ((), TypeError, r"must be an int or a sequence of ints, got \(\)"),
        ([4, "a"], TypeError, r"must be an int or a sequence of ints, got \[4, 'a'\]"),
        (-1, ValueError, "must be ≥ 0, got -1"), ((3, -8), ValueError, r"must be ≥ 0, got \(3, -8\)"))),
    *((ValueError, "Norm: eps must be ≥ 0, got -1.0", lambda kind=kind: kind(8, eps=-1.0))
      for kind in (LayerNorm, RMSNorm)),
    (ValueError, "rounding must be 'once' or 'twice', got 'never'", lambda: RMSNorm(8, rounding="never")),
    (ValueError, "takes no offset", lambda: RMSNorm(8, rounding="twice", offset=1.0)),
    (TypeError, "RMSNorm: offset must be a number, got str", lambda: RMSNorm(4, offset="one")),
    (ValueError, "dim must be ≥ 1, got 0", lambda: WeightedSum(0)),
    (TypeError, "dim must be an int, got float", lambda: WeightedSum(8.0)),
    (ValueError, "num_vectors must be ≥ 1 and ≤ 16, got 0", lambda: WeightedSum(8, 0)),
    (ValueError, "num_vectors must be ≥ 1 and ≤ 16, got 17", lambda: WeightedSum(8, 17)),
    (TypeError, "num_vectors must be an int, got str", lambda: WeightedSum(8, "3")),
]  # fmt: skip


@pytest.mark.parametrize(("error", "match", "call"), ROWS, ids=[f"{i}-{row[1]}" for i, row in enumerate(ROWS)])
def test_what_is_refused(error: type[Exception], match: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=match):
        call()

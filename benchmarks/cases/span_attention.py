"""Bench cases of span_attention: a window of keys per query, and chosen queries to chosen keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.case import Case, Impl, staged
from onepass.ops.span_attention.op import span_attention

HEADS, WIDTH = 8, 64


def _spans(n: int, m: int, window: int | None, causal: bool, device: str) -> tuple[Tensor, Tensor]:
    """First and one past the last key of each query: windows of their own, the one before and the one after."""
    i = torch.arange(n, device=device)
    if window is None:
        return torch.zeros_like(i), torch.full_like(i, m)
    index = i // window
    last = i + 1 if causal else (index + 2) * window
    return ((index - 1) * window).clamp(0), last.clamp(max=m)


def _heads_first(*tensors: Tensor) -> Any:
    return [t.transpose(1, 2) for t in tensors]


def _flex(q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(
        lambda b, h, i, j: (j >= first[i]) & (j < last[i]), None, None, q.shape[1], k.shape[1], device="cuda"
    )
    compiled: Any = torch.compile(flex_attention)
    return lambda: compiled(*_heads_first(q, k, v), block_mask=mask).transpose(1, 2)


def _case(batch: int, n: int, m: int, window: int | None, causal: bool, stage: str, device: str) -> Case:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def make() -> Mapping[str, Impl]:
        q, k, v = (torch.randn(batch, length, HEADS, WIDTH, device=device, dtype=dtype) for length in (n, m, m))
        first, last = _spans(n, m, window, causal, device)
        impls: dict[str, Callable[[], Any]] = {"onepass": lambda: span_attention(q, k, v, first, last)}
        if device == "cuda":
            impls["flex_attention, torch.compile"] = _flex(q, k, v, first, last)
        if window is None:
            impls["sdpa"] = lambda: scaled_dot_product_attention(*_heads_first(q, k, v)).transpose(1, 2)
        return staged(stage, impls, (q, k, v))

    floor = batch * HEADS * WIDTH * dtype.itemsize * (2 * n + 2 * m) * (2 if stage == "backward" else 1)
    params = {"batch": batch, "queries": n, "keys": m, "window": window or 0, "causal": causal}
    return Case("span_attention", stage, params, dtype, floor, make, check=0.05, device=device)


def _cases() -> Iterator[Case]:
    for batch, n, m, window, causal, device in (
        (2, 32768, 32768, 128, False, "cuda"),
        (2, 32768, 32768, 256, True, "cuda"),
        (2, 8192, 8192, 256, True, "cuda"),
        (2, 2048, 4096, None, False, "cuda"),
        (1, 256, 256, None, False, "cpu"),
    ):
        for stage in ("forward", "backward"):
            yield _case(batch, n, m, window, causal, stage, device)


CASES = list(_cases())

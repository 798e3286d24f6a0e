"""A step of decoding by kernels: one more token through a routed block in nine launches.

Results, residual added, and caches are those of the modules' steps, to rounding. Layers are Any: they import this.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.core.launch import cdiv, launch, next_power_of_2, uses_triton
from onepass.ops.span_attention.definition import LOG2_BASE

# sequences side by side: the rows of one product
MOST_ROWS = 64
# split-K: keys per split; most splits
PART, PARTS = 512, 64


def fits(x: Tensor) -> bool:
    """Return whether these kernels take tokens (batch, 1, dim); `nn` asks whether they fit the layer."""
    return uses_triton(x) and len(x) <= MOST_ROWS and not torch.is_autocast_enabled(x.device.type)


def _launch(kernel: str, grid: Any, tensors: Any, numbers: Any, constants: Any, **options: int) -> None:
    from . import kernels_decoding

    launch(getattr(kernels_decoding, kernel), grid, tensors, numbers, constants, **options)


def attention(layer: Any, cache: Any, x: Tensor, score_eps: float) -> Tensor:
    """Return x + attention (batch, 1, dim) of one more token of each sequence."""
    light, heavy, position = layer.light, layer.heavy, cache.clock.position
    keys, x = cache.heavy.keys, x.contiguous()
    norms = light.norm, heavy.norm_q
    light_x, heavy_x, gates = _choose(layer.router_q, cache.queries, x, norms, score_eps, cache.tokens)
    qkv, q = _both((light_x, light.qkv.weight, None), (heavy_x, heavy.q.weight, None), gates, gelu=False)
    local, update = attend(light, cache.light, qkv), torch.empty_like(q)
    half, parts = heavy.dim_head // 2, min(PARTS, cdiv(keys.shape[1], PART))
    partials = _partials(len(x), heavy, parts, x.device)
    block_heavy = max(8, next_power_of_2(half))
    _launch(
        "far_kernel", (parts, heavy.heads, len(x)),
        (q, position, gates, keys, cache.heavy.values, *partials), (heavy.dim_head**-0.5, *LOG2_BASE),
        (
            heavy.heads, half, layer.window, cache.heavy.quota, keys.shape[1], parts, block_heavy,
            _keys(PART, block_heavy) // 2,
        ), num_warps=4,
    )  # fmt: skip
    _merge(heavy, partials, gates, update)
    return _sum((local, light.out.weight, None), (update, heavy.out.weight, None), gates, layer.null, x)


def attend(layer: Any, cache: Any, qkv: Tensor, weights: tuple[Any, Any] = (None, None), eps: float = 0.0) -> Tensor:
    """Return the attention (batch, heads·dim_head) of one more token, from its projection (batch, 1, 3·heads·dim_head).

    The cache gets its key and value. With `weights`, queries and keys are normed per head.
    """
    places, half, out = cache.keys.shape[1], layer.dim_head // 2, qkv.new_empty(len(qkv), qkv.shape[-1] // 3)
    parts, block_h = min(PARTS, cdiv(places, PART)), max(8, next_power_of_2(half))
    partials = _partials(len(qkv), layer, parts, qkv.device) if parts > 1 else (None,) * 3
    _launch(
        "near_kernel", (parts, layer.heads, len(qkv)),
        (qkv, *weights, cache.clock.position, cache.keys, cache.values, out, *partials),
        (layer.dim_head**-0.5, float(eps), *LOG2_BASE),
        (
            layer.heads, half, layer.window or 0, places, parts, block_h,
            _keys(places, block_h) if parts == 1 else _keys(PART, block_h) // 2,
        ), num_warps=8 if parts == 1 else 4,
    )  # fmt: skip
    if parts > 1:
        _merge(layer, partials, None, out)
    return out


def _partials(batch: int, layer: Any, parts: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return memory for what each part of a layer's keys gives: sums of values, sums of weights, maxima."""
    sums = torch.empty(batch, layer.heads, parts, layer.dim_head, dtype=torch.float32, device=device)
    return sums, *torch.empty(2, batch, layer.heads, parts, dtype=torch.float32, device=device)


def _merge(layer: Any, partials: tuple[Tensor | None, ...], gates: Tensor | None, out: Tensor) -> None:
    parts, half = partials[0].shape[2], layer.dim_head // 2  # type: ignore[union-attr]
    _launch(
        "merge_kernel", (layer.heads, len(out), 1), (*partials, gates, out), (),
        (layer.heads, half, parts, max(8, next_power_of_2(half)), next_power_of_2(parts)), num_warps=2,
    )  # fmt: skip


def feed_forward(layer: Any, cache: Any, x: Tensor, score_eps: float) -> Tensor:
    """Return x + feed_forward (batch, 1, dim) of one more token of each sequence."""
    light, heavy = layer.light, layer.heavy
    x = x.contiguous()
    light_x, heavy_x, gates = _choose(layer.router, cache, x, (light.norm, heavy.norm), score_eps, None)
    light_h, heavy_h = _both(
        (light_x, light.up.weight, light.up.bias), (heavy_x, heavy.up.weight, heavy.up.bias), gates, gelu=True
    )
    return _sum(
        (light_h, light.down.weight, light.down.bias), (heavy_h, heavy.down.weight, heavy.down.bias), gates, None, x
    )


def scores(router: Any, x: Tensor, score_eps: float) -> Tensor:
    """Return the scores (batch, n) of a prompt: the bits that steps compute for the same tokens."""
    batch, n, dim = x.shape
    result, block = torch.empty(batch, n, dtype=torch.float32, device=x.device), next_power_of_2(dim)
    _launch(
        "score_kernel", (batch * n, 1, 1), (x.contiguous(), router.weight, result), (float(score_eps),),
        (dim, block), num_warps=_warps(block),
    )  # fmt: skip
    return result


def _warps(block: int) -> int:
    return 4 if block <= 2048 else 8


def _choose(
    router: Any, cache: Any, x: Tensor, norms: tuple[Any, Any], score_eps: float, tokens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x normed for both branches, and the gates (batch,)."""
    cache.refresh(router)
    (batch, _, dim), (numerator, denominator) = x.shape, cache.share
    light, heavy = torch.empty(2, batch, dim, dtype=x.dtype, device=x.device)
    gates = torch.empty(batch, dtype=torch.float32, device=x.device)
    block = next_power_of_2(dim)
    _launch(
        "choose_kernel", (batch, 1, 1),
        (
            x, router.weight, norms[0].weight, norms[1].weight, cache.clock.position, cache.scores,
            cache.threshold, cache.taken, tokens, gates, light, heavy,
        ),
        (numerator, denominator, *(float(norm.eps_for(x)) for norm in norms), float(score_eps), float(router.eps)),
        (dim, router.block, router.memory, 1 if tokens is None else tokens.shape[1], block),
        num_warps=_warps(block),
    )  # fmt: skip
    return light, heavy, gates


# tokens, weight, bias or None
Linear = tuple[Tensor, Tensor, Any]


def _both(light: Linear, heavy: Linear, gates: Tensor, *, gelu: bool) -> tuple[Tensor, Tensor]:
    (x, w, _), (_, heavy_w, _) = light, heavy
    (n, k), m, rows = w.shape, len(heavy_w), len(gates)
    y, update = x.new_empty(rows, n), x.new_empty(rows, m)
    block_n, block_k = 16, _columns(k, w)
    _launch(
        "both_kernel", (cdiv(n, block_n) + cdiv(m, block_n), 1, 1),
        (*_contiguous(light), y, *_contiguous(heavy), update, gates), (),
        (gelu, rows, n, m, k, max(16, next_power_of_2(rows)), block_n, block_k), num_warps=4,
    )  # fmt: skip
    return y, update


def _sum(light: Linear, heavy: Linear, gates: Tensor, null: Tensor | None, x: Tensor) -> Tensor:
    rows, dim, block_n, y = len(gates), x.shape[-1], 16, torch.empty_like(x)
    k, m = light[1].shape[1], heavy[1].shape[1]
    _launch(
        "sum_kernel", (cdiv(dim, block_n), 1, 1),
        (*_contiguous(light), *_contiguous(heavy), gates, null, x, y), (),
        (rows, dim, k, m, max(16, next_power_of_2(rows)), block_n, _columns(max(k, m), light[1])), num_warps=4,
    )  # fmt: skip
    return y


def _contiguous(linear: Linear) -> tuple[Tensor, Tensor, Any]:
    x, w, bias = linear
    return x, w.contiguous(), bias


def _columns(k: int, w: Tensor) -> int:
    """Return how many columns a program loads at a time: 512 bytes of each row."""
    return max(16, min(512 // w.element_size(), next_power_of_2(k)))


def _keys(places: int, block_h: int) -> int:
    """Return how many keys a program takes at a time."""
    return max(16, min(next_power_of_2(places), 8192 // block_h))

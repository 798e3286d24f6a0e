"""Cases of the modules, with their rivals: `python -m benchmarks fused`.

Weights differ between implementations, so results are not compared;
the byte floor is a formal one (x, y and their gradients).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.case import Case, Impl, Prepared, graphed
from onepass.nn.attention import RoutedAttention
from onepass.nn.block import RoutedBlock
from onepass.nn.norm import RMSNorm
from onepass.nn.routed import FeedForward, RoutedFeedForward
from onepass.nn.transformer import TransformerBlock

RIVALS = {"colt5_attention": "colt5-attention"}


class DenseBlock(nn.Module):
    """The block that `RoutedBlock` replaces: flash attention over all tokens, a dense feed-forward 4 times as wide."""

    def __init__(self, dim: int, heads: int = 8, dim_head: int = 64) -> None:
        super().__init__()
        self.heads, self.dim_head = heads, dim_head
        self.norm = RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.out = nn.Linear(heads * dim_head, dim, bias=False)
        self.feed_forward = FeedForward(dim, 4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, self.dim_head)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    """Allow TF32 in matrix products, ours and the rivals', as fp32 training on such a GPU does."""
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)


def both_passes(module: Callable[[], nn.Module], x: Tensor, autocast: bool, tf32: bool = False) -> Prepared:
    """Forward and backward of a module built when its turn comes, with gradients of x and of all parameters."""

    def build() -> Callable[[], Any]:
        layer = module().to(x.device)
        inputs = (x, *layer.parameters())

        def forward() -> Tensor:
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                return layer(x)  # type: ignore[no-any-return]

        dy = torch.randn_like(forward().detach())

        def run() -> None:
            # as a training step does: gradients of the last one are gone, new ones are written
            with _tf32() if tf32 else contextlib.nullcontext():
                torch.autograd.grad(forward(), inputs, dy, allow_unused=True)

        return run

    return Prepared(build)


def _colt5(name: str, dim: int, **options: Any) -> nn.Module:
    return getattr(importlib.import_module("colt5_attention"), name)(dim, **options)  # type: ignore[no-any-return]


def _feed_forward(batch: int, n: int, dim: int, dtype: torch.dtype) -> Case:
    autocast = dtype == torch.bfloat16

    def make() -> Mapping[str, Impl]:
        x = torch.randn(batch, n, dim, device="cuda", requires_grad=True)

        def of(module: Callable[[], nn.Module]) -> Prepared:
            return both_passes(module, x, autocast, tf32=not autocast)

        ours, dense = of(lambda: RoutedFeedForward(dim, 1 / 16)), of(lambda: FeedForward(dim, 4 * dim))
        impls: dict[str, Impl] = {
            "onepass": ours,
            "dense": dense,
            "light alone": of(lambda: FeedForward(dim, dim // 2)),
        }
        if autocast:
            return impls | {"onepass, CUDA graph": graphed(ours.build), "dense, CUDA graph": graphed(dense.build)}
        # its kernels know fp32 alone: under autocast it fails
        for name, kernel in (("colt5 eager", False), ("colt5 triton", True)):
            options = {"num_heavy_tokens": n // 16, "use_triton": kernel}
            impls[name] = of(partial(_colt5, "ConditionalRoutedFeedForward", dim, **options))
        return impls

    floor = 4 * batch * n * dim * dtype.itemsize
    params = {"batch": batch, "n": n, "dim": dim, "k": n // 16}
    return Case("routed_feed_forward", "forward+backward", params, dtype, floor, make)


def _block(n: int, dim: int, dtype: torch.dtype, causal: bool) -> Case:
    """k_q = k = n/16, k_kv = n/8; the residual stream in fp32, in bf16 the branches under autocast, in fp32 TF32."""
    autocast, batch = dtype == torch.bfloat16, 2

    def make() -> Mapping[str, Impl]:
        x = torch.randn(batch, n, dim, device="cuda", requires_grad=True)

        def impl(module: Callable[[], nn.Module]) -> Prepared:
            return both_passes(module, x, autocast, not autocast)

        block = partial(RoutedBlock, dim, 1 / 16, k_kv=1 / 8, window=128, causal=causal)
        impls: dict[str, Impl] = {"onepass": impl(block)}
        if autocast:
            if not causal:
                impls["dense flash"] = impl(lambda: DenseBlock(dim))
                impls["attention alone"] = impl(lambda: RoutedAttention(dim, 1 / 16, 1 / 8, window=128))
            return impls
        # its kernels know fp32 alone: under autocast it fails
        names = "num_heavy_ff_tokens", "num_heavy_attn_tokens_q", "num_heavy_attn_tokens_kv"
        counts = dict(zip(names, (n // 16, n // 16, n // 8), strict=True))
        impls["colt5 triton"] = impl(
            partial(_colt5, "ConditionalRoutedTransformerBlock", dim, use_triton=True, **counts)
        )
        return impls

    params = {"batch": batch, "n": n, "dim": dim, "k": n // 16, "causal": causal}
    return Case("routed_block", "forward+backward", params, dtype, 4 * batch * n * dim * dtype.itemsize, make)


class _TorchBlock(nn.Module):
    """A causal `TransformerBlock` by torch alone: heads normed and turned, flex_attention for windows, else flash."""

    def __init__(self, dim: int, n: int, window: int | None) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for width in (dim, dim, 64, 64))
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)
        angle = torch.arange(n, device="cuda")[:, None] * 10_000 ** (-torch.arange(0, 64, 2, device="cuda") / 64)
        self.cos, self.sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        self.mask = None
        if window is not None:
            self.mask = create_block_mask(
                lambda b, h, i, j: (j <= i) & (i // window - j // window <= 1), None, None, n, n, device="cuda"
            )

    def _turned(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), -1)

    def forward(self, x: Tensor) -> Tensor:
        norm_x, norm_h, norm_q, norm_k = self.norms
        q, k, v = self.qkv(norm_x(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        q, k = (self._turned(norm(t).to(v.dtype)) for norm, t in ((norm_q, q), (norm_k, k)))
        if self.mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = flex_attention(q, k, v, block_mask=self.mask)  # type: ignore[assignment]
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(norm_h(x))))  # type: ignore[no-any-return]


def _transformer(batch: int, n: int, dim: int, window: int | None) -> Case:
    """The residual stream in fp32, the rest under bf16 autocast, as in `_block`."""

    def make() -> Mapping[str, Impl]:
        x = torch.randn(batch, n, dim, device="cuda", requires_grad=True)
        ours = partial(TransformerBlock, dim, window=window, causal=True)
        modules: dict[str, Callable[[], Any]] = {
            "onepass": ours,
            "onepass, torch.compile": lambda: torch.compile(ours().cuda(), dynamic=False),
            "torch.compile": lambda: torch.compile(_TorchBlock(dim, n, window).cuda(), dynamic=False),
        }
        steps = {name: both_passes(module, x, True) for name, module in modules.items()}
        return steps | {f"{name}, CUDA graph": graphed(step.build) for name, step in steps.items()}

    params = {"batch": batch, "n": n, "dim": dim, "window": window or 0}
    return Case("transformer_block", "forward+backward", params, torch.bfloat16, 8 * batch * n * dim, make)


def _cases() -> Iterator[Case]:
    for batch, n, dim in ((2, 8192, 256), (2, 8192, 512), (1, 32768, 512)):
        for window in (128, 256, None):
            yield _transformer(batch, n, dim, window)
    for n in (32768, 8192):
        for dim in (1024, 512):
            yield _block(n, dim, torch.bfloat16, False)
    yield _block(32768, 1024, torch.bfloat16, True)
    yield _block(32768, 1024, torch.float32, False)
    for dtype in (torch.bfloat16, torch.float32):
        for n in (32768, 8192):
            for dim in (1024, 512):
                yield _feed_forward(2, n, dim, dtype)


CASES = list(_cases())

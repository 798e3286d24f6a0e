"""The arms: the routed model of the ablation, the dense one in the fastest form that torch has for it, and a hybrid."""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from onepass.nn import RMSNorm
from onepass.train.language import ByteModel
from research.ablate import text

# torch's kernels that never hold the n × n scores
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
REPEATS = 5
ATTENTION = 4  # one block in so many of the hybrid attends


class GatedDeltaNet(nn.Module):
    """Pre-norm gated delta net of flash-linear-attention (arXiv:2412.06464), in the place of a block's attention."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        layers = importlib.import_module("fla.layers")
        # the package's own proportions: heads take 3/4 of the width, values twice as much
        head = 64 if dim <= 256 else 128
        self.norm = RMSNorm(dim)
        self.layer = layers.GatedDeltaNet(dim, head_dim=head, num_heads=max(1, 3 * dim // 4 // head), expand_v=2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.layer(self.norm(x))[0]  # type: ignore[no-any-return]


class Task(text.Task):
    """`text.Task` of one arm; the dense one attends with the fastest kernel and, on CUDA, has its blocks compiled.

    The dense arm has a feed-forward of 4·dim hidden units, as the heavy branch of the routed one. The hybrid is the
    dense arm with a gated delta net for attention in three blocks of four.
    """

    def __init__(
        self, arm: str, seed: int, size: text.Size, device: torch.device, *, causal: bool, compiled: bool,
        attention: str = "",
    ) -> None:  # fmt: skip
        super().__init__(arm, seed, size, device, 4 * size.dim, causal=causal)
        self.attention, self.compiled = "", compiled and arm != "learned"
        if arm != "learned" and device.type == "cuda":
            heads = size.dense_heads or size.heads
            self.attention = attention or fastest_attention(size.batch, heads, size.n, size.dim, causal)
        if self.compiled:
            for block in self.model.blocks:
                # one program for all blocks and seeds; other lengths get programs of their own
                part: Any = block.feed_forward if isinstance(block.attention, GatedDeltaNet) else block
                part.compile(fullgraph=True, dynamic=False)

    def build(self, hidden: int) -> ByteModel:
        model = super().build(hidden)
        if self.arm == "hybrid":
            for place, block in enumerate(model.blocks, 1):
                if place % ATTENTION:
                    block.attention = GatedDeltaNet(self.size.dim)
        return model

    def loss(self, tokens: Tensor, wanted: Tensor, places: Tensor | None = None) -> Tensor:
        with self._attending():
            return super().loss(tokens, wanted, places)

    @torch.no_grad()
    def measure(self, last: bool) -> dict[str, float]:
        # another compiled program for measurements would cost more than it saves
        eager: Any = torch.compiler.set_stance("force_eager") if self.compiled else contextlib.nullcontext()
        with self._attending(), eager:
            return super().measure(last)

    @contextlib.contextmanager
    def _attending(self) -> Iterator[None]:
        with sdpa_kernel(BACKENDS[self.attention]) if self.attention else contextlib.nullcontext():
            yield


@functools.lru_cache
def fastest_attention(batch: int, heads: int, n: int, dim: int, causal: bool) -> str:
    """Name the backend of torch's attention that is fastest forward and backward, in bf16; "" where there is none."""
    shape = (batch, heads, n, dim // heads)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    times = {}
    for name, backend in BACKENDS.items():
        # a backend that doesn't take these shapes raises
        with contextlib.suppress(RuntimeError), sdpa_kernel(backend):
            for repeat in range(REPEATS + 2):
                if repeat == 2:
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
                torch.autograd.grad(y, (q, k, v), y)
            torch.cuda.synchronize()
            times[name] = time.perf_counter() - start
    return min(times, key=lambda name: times[name], default="")

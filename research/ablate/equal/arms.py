"""The two arms: the routed model of the ablation, and the dense one in the fastest form that torch has for it."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from research.ablate import text

# torch's kernels that never hold the n × n scores
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
REPEATS = 5


class Task(text.Task):
    """`text.Task` of one arm; the dense one attends with the fastest kernel and, on CUDA, has its blocks compiled.

    The dense arm has a feed-forward of 4·dim hidden units, as the heavy branch of the routed one.
    """

    def __init__(
        self, arm: str, seed: int, size: text.Size, device: torch.device, *, causal: bool, compiled: bool,
        attention: str = "",
    ) -> None:  # fmt: skip
        super().__init__(arm, seed, size, device, 4 * size.dim, causal=causal)
        self.attention, self.compiled = "", compiled and arm == "dense"
        if arm == "dense" and device.type == "cuda":
            heads = size.dense_heads or size.heads
            self.attention = attention or fastest_attention(size.batch, heads, size.n, size.dim, causal)
        if self.compiled:
            for block in self.model.blocks:
                # one program for all blocks and seeds; other lengths get programs of their own
                block.compile(fullgraph=True, dynamic=False)

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

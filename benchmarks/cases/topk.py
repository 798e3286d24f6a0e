"""Benchmark cases of topk: the choice alone, with trainable gates, and in a sparse autoencoder's step."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Case, Definition, Impl, Prepared, graphed, staged
from onepass.ops.soft_topk.op import soft_topk
from onepass.ops.topk.op import topk

# import name → distribution
RIVALS = {"flashinfer": "flashinfer-python"}
CELLS = ((64, 32768, 2048), (1024, 8192, 512), (4096, 1024, 64), (8, 1 << 20, 65536))
# sparse autoencoders, vocabularies, expert routers; indexers of sparse attention; few rows
CHOICES = (
    (4096, 65536, 32), (8192, 131072, 64), (16384, 24576, 64), (4096, 16384, 32), (4096, 16384, 100),
    (8192, 32768, 64), (8192, 131072, 32), (4096, 65536, 128),
    (4096, 50257, 50), (256, 50257, 50), (64, 50257, 50), (256, 128256, 50),
    (65536, 64, 8), (65536, 60, 4), (32768, 256, 8), (4096, 1024, 64),
    (4096, 8192, 512), (4096, 32768, 2048), (8192, 8192, 2048), (16384, 16384, 2048), (2048, 131072, 2048),
    (256, 65536, 1024), (128, 131072, 2048), (64, 131072, 2048), (64, 32768, 2048), (2, 32768, 2048),
    (1, 131072, 2048), (8, 1 << 20, 2048), (8, 1 << 20, 65536),
)  # fmt: skip
# scores rounded to quarters: hundreds of equal ones
TIES = ((4096, 50257, 50), (64, 50257, 50), (4096, 65536, 32), (4096, 32768, 2048))
# tokens, dim, latents, k at which SAELens and dictionary_learning train, whose decoders read all latents, and sparsify
STEPS = (
    ("dense", 4096, 2304, 16384, 100, torch.float32), ("dense", 8192, 512, 32768, 64, torch.float32),
    ("sparse", 8192, 4096, 65536, 32, torch.bfloat16), ("sparse", 8192, 4096, 131072, 32, torch.bfloat16),
)  # fmt: skip
# small enough for a CPU
CPU_CELLS = ((1, 1 << 20), (256, 8192), (16, 8192), (64, 1024))
COMPARED = 256  # rows that are compared


def _case(rows: int, cols: int, k: int, stage: str, device: str = "cuda") -> Case:
    """Measure selection with trainable gates; the rival combines torch.topk with our soft_topk."""

    def make() -> Mapping[str, Impl]:
        s = torch.randn(rows, cols, device=device, requires_grad=True)

        def ours() -> tuple[Tensor, Tensor]:
            top = topk(s, k)
            return top.values, top.gates

        def composed() -> tuple[Tensor, Tensor]:
            values, indices = torch.topk(s, k)
            soft = soft_topk(s, k).gather(-1, indices)
            return values, soft + (1 - soft).detach()

        if stage == "forward":
            impls: dict[str, Impl] = {"onepass": ours, "torch.topk + soft_topk": composed}
            impls["torch.topk without gates"] = lambda: torch.topk(s.detach(), k)
            return impls
        return staged(stage, {"onepass": lambda: ours()[1], "torch.topk + soft_topk": lambda: composed()[1]}, (s,))

    # forward: read scores, write a value, an index and a gate for each of k, 16 bytes
    # backward: read scores, write their gradients, and 12 bytes for each of k: index and gradient of the gate
    floor = rows * (cols * 4 + k * 16) if stage == "forward" else rows * (cols * 8 + k * 12)
    params = {"rows": rows, "cols": cols, "k": k, "gates": "gates"}
    return Case("topk", stage, params, torch.float32, floor, make, device=device)


def _flashinfer(s: Tensor, k: int, **options: Any) -> Any:
    return importlib.import_module("flashinfer.topk").top_k(s, k, **options)


def _choice(rows: int, cols: int, k: int, dtype: torch.dtype, ties: bool = False) -> Case:
    """Measure the choice alone in a CUDA graph; values in descending order, of ours the indices too, are compared."""

    def make() -> Mapping[str, Impl]:
        s = torch.randn(rows, cols, device="cuda")
        s = ((4 * s).round() / 4 if ties else s).to(dtype)
        order = s[:COMPARED].sort(dim=-1, descending=True, stable=True)

        def impl(call: Callable[[], Any], exact: bool = False, by_index: bool = False) -> Prepared:
            def compared(result: Any) -> list[Tensor | None]:
                values, indices = (t[:COMPARED].double() for t in result[:2])
                if by_index and exact:
                    # by index: equal to the definition's indices, sorted by column
                    right = order.indices[:, :k].sort(-1).values
                    indices = torch.where((indices == right).all(), order.indices[:, :k], -1)
                return [values.sort(-1, descending=True).values, indices.double() if exact else None]

            return graphed(lambda: call, compared)

        impls: dict[str, Impl] = {
            "definition": Definition(lambda: [order.values[:, :k].double(), order.indices[:, :k].double()]),
            "onepass": impl(lambda: topk(s, k), True),
            "onepass, by index": impl(lambda: topk(s, k, sorted=False), True, True),
            "torch.topk": impl(lambda: torch.topk(s, k)),
            "torch.topk, no order": impl(lambda: torch.topk(s, k, sorted=False)),
        }
        certain = {"deterministic": True, "tie_break": 1}
        ways: dict[str, dict[str, Any]] = {
            "flashinfer": {"sorted": True}, "flashinfer, deterministic": {"sorted": True, **certain},
            "flashinfer, no order": {}, "flashinfer, no order, deterministic": certain,
        }  # fmt: skip
        for name, options in ways.items():
            impls[name] = impl(partial(_flashinfer, s, k, **options), len(options) == 3)
        return impls

    # read scores, write a value, an index and a gate for each of k
    floor = rows * (cols * dtype.itemsize + k * (8 + 2 * dtype.itemsize))
    params = {"rows": rows, "cols": cols, "k": k} | ({"ties": "ties"} if ties else {})
    return Case("topk", "forward", params, dtype, floor, make, 0.0)


def _step(decoder: str, tokens: int, dim: int, latents: int, k: int, dtype: torch.dtype) -> Case:
    """Measure both passes of a sparse autoencoder; of torch.topk's, with ties by chance, the loss is compared."""

    def make() -> Mapping[str, Impl]:
        x, up = torch.randn(tokens, dim, device="cuda", dtype=dtype), torch.randn(dim, latents, device="cuda")
        up = (up / up.norm(dim=0)).to(dtype)
        leaves = (up.requires_grad_(), up.detach().T.contiguous().requires_grad_())

        def step(choose: Callable[..., Any]) -> Callable[[], list[Tensor]]:
            def call() -> list[Tensor]:
                z = (x @ leaves[0]).relu()
                values, indices = choose(z, k, sorted=False)[:2]
                if decoder == "dense":
                    y = torch.zeros_like(z).scatter(-1, indices, values) @ leaves[1]
                else:
                    y = (leaves[1][indices] * values[..., None]).sum(1)
                loss = (x - y).float().square().mean()
                return [loss.detach()[None], *torch.autograd.grad(loss, leaves)]

            return call

        def exactly(z: Tensor, k: int, **_: Any) -> tuple[Tensor, Tensor]:
            indices = z.detach().sort(dim=-1, descending=True, stable=True).indices[:, :k]
            return z.gather(-1, indices), indices

        def loss_alone(results: list[Tensor]) -> list[Tensor | None]:
            return [results[0], None, None]

        by_torch = Prepared(lambda: step(torch.topk), loss_alone)
        return {"definition": Definition(step(exactly)), "onepass": step(topk), "torch.topk": by_torch}

    params = {"decoder": decoder, "tokens": tokens, "dim": dim, "latents": latents, "k": k}
    floor = (tokens * dim + 4 * dim * latents) * dtype.itemsize
    return Case("autoencoder", "forward+backward", params, dtype, floor, make, 2e-2)


def _cases() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        for cell in CHOICES:
            yield _choice(*cell, dtype)
        for cell in TIES:
            yield _choice(*cell, dtype, True)
    for sizes in STEPS:
        yield _step(*sizes)
    for stage in ("forward", "backward"):
        for rows, cols, k in CELLS:
            yield _case(rows, cols, k, stage)
        for rows, cols in CPU_CELLS:
            yield _case(rows, cols, cols // 16, stage, "cpu")


CASES = list(_cases())

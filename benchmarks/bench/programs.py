"""What `python -m benchmarks program` runs: layers and models in training, ours beside what they stand in for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onepass
from benchmarks.case import optional
from onepass.nn import RMSNorm, RoutedBlock, RoutedFeedForward
from onepass.nn.feed_forward import FeedForward


class Program(NamedTuple):
    """One module with its input, and the program that it is compared with.

    Attributes:
        name: what is run; programs that are compared share `case`.
        case: sizes, as text.
        module: builds the module on a device, fp32 parameters.
        x: builds the input on a device.
        autocast: run in bf16 autocast.
        backward: run forward and backward; else forward alone.
        base: name of the program of the same case that it is compared with; None for that program itself.
    """

    name: str
    case: str
    module: Callable[[str], nn.Module]
    x: Callable[[str], Tensor]
    autocast: bool = True
    backward: bool = True
    base: str | None = None


class DenseBlock(nn.Module):
    """What a `RoutedBlock` stands in for: flash attention of all to all, a dense feed-forward 4 times as wide."""

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


def _routed(batch: int, n: int, dim: int) -> Iterator[Program]:
    """Routed layers with k = n/16 and k_kv = n/8 beside dense ones."""
    case = f"{batch}x{n}, d {dim}"

    def program(name: str, module: Callable[[], nn.Module], base: str | None = None) -> Program:
        def x(device: str) -> Tensor:
            return torch.randn(batch, n, dim, device=device, requires_grad=True)

        return Program(name, case, lambda device: module().to(device), x, base=base)

    feed_forward, block = "dense feed-forward", "dense block"
    yield program(feed_forward, lambda: FeedForward(dim, 4 * dim))
    yield program("RoutedFeedForward", lambda: RoutedFeedForward(dim, 1 / 16), feed_forward)
    yield program(block, lambda: DenseBlock(dim))
    yield program("RoutedBlock", lambda: RoutedBlock(dim, 1 / 16, k_kv=1 / 8), block)
    yield program("RoutedBlock causal", lambda: RoutedBlock(dim, 1 / 16, k_kv=1 / 8, causal=True), block)


class _Torch(nn.Module):
    """A norm by torch's own function."""

    def __init__(self, dim: int, mean: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim))
        self.bias = nn.Parameter(torch.rand(dim)) if mean else None
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return F.rms_norm(x, (self.dim,), self.weight, 1e-6)
        return F.layer_norm(x, (self.dim,), self.weight, self.bias, 1e-5)


def _norms(rows: int, cols: int) -> Iterator[Program]:
    """One norm alone: what a compiled model pays for each."""
    for backward in (False, True):
        case = f"{rows}x{cols} " + ("forward+backward" if backward else "forward")

        def program(
            name: str, module: Callable[[], nn.Module], base: str | None = None, *, case: str = case,
            backward: bool = backward,
        ) -> Program:  # fmt: skip
            def x(device: str) -> Tensor:
                return torch.randn(rows, cols, device=device, requires_grad=backward)

            def build(device: str) -> nn.Module:
                return module().to(device).requires_grad_(backward)

            return Program(name, case, build, x, autocast=False, backward=backward, base=base)

        yield program("F.layer_norm", lambda: _Torch(cols, True))
        yield program("layer_norm", lambda: onepass.nn.LayerNorm(cols), "F.layer_norm")
        yield program("F.rms_norm", lambda: _Torch(cols, False))
        yield program("rms_norm", lambda: onepass.nn.RMSNorm(cols), "F.rms_norm")


class _Loss(nn.Module):
    """A causal language model as a module of its tokens: returns the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss  # type: ignore[no-any-return]


def _llama(dim: int, layers: int, tokens: int) -> Iterator[Program]:
    """A Llama-shaped model of transformers in bf16, built from its configuration, with its norms and with ours."""
    transformers: Any = optional("transformers")
    if transformers is None:
        return

    def module(device: str, ours: bool) -> nn.Module:
        config = transformers.LlamaConfig(
            hidden_size=dim, intermediate_size=4 * dim, num_hidden_layers=layers, num_attention_heads=dim // 128,
            num_key_value_heads=max(1, dim // 512), vocab_size=32000, max_position_embeddings=tokens,
        )  # fmt: skip
        with torch.device(device):
            model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        if ours:
            onepass.swap(model)
        return _Loss(model)

    def x(device: str) -> Tensor:
        return torch.randint(0, 32000, (1, tokens), device=device)

    case = f"{layers} layers, d {dim}, {tokens} tokens"
    base = "Llama, its norms"
    yield Program(base, case, lambda device: module(device, False), x, autocast=False)
    yield Program("Llama, swapped", case, lambda device: module(device, True), x, autocast=False, base=base)


def programs(device: str) -> list[Program]:
    """Return the programs for a device; a CPU gets small ones."""
    if device == "cpu":
        return [*_routed(2, 256, 64), *_norms(16, 1024), *_llama(128, 2, 64)]
    sizes = (2, 8192, 1024), (2, 8192, 512), (2, 4096, 768), (2, 2048, 1024), (2, 32768, 1024)
    return [p for size in sizes for p in _routed(*size)] + [*_norms(16, 1024), *_llama(2048, 16, 4096)]


__all__ = ["DenseBlock", "Program", "programs"]

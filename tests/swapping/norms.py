"""Norms and things like norms, for the tests of `onepass.swap`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import onepass


class FooRMSNorm(nn.Module):
    """As transformers' write it; the options make it something else."""

    def __init__(self, dim: int, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim) - offset)
        self.variance_epsilon = eps
        self.offset_of_mine = offset

    def forward(self, hidden: Tensor) -> Tensor:
        h = hidden.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return ((self.offset_of_mine + self.weight.float()) * h).to(hidden.dtype)


class Tiny(nn.Module):
    """Two norms of torch, one by name, linear layers between."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.LayerNorm(dim), nn.RMSNorm(dim), FooRMSNorm(dim, offset=1.0)
        self.l1, self.l2 = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.l2(self.b(self.l1(self.a(x)))))


def shuffle(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))
    return model


class NamedLayerNorm(nn.Module):
    def __init__(self, dim: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = 1e-5
        if bias:
            self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.weight.shape, self.weight, getattr(self, "bias", None), self.eps)


class InFloat(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        w, b = self.weight.float(), self.bias.float()
        return nn.functional.layer_norm(input.float(), self.normalized_shape, w, b, self.eps).to(input.dtype)


def _like(name: str, forward: Callable[[Any, Tensor], Tensor], doc: str = "") -> type[FooRMSNorm]:
    """A class of its own whose forward is another function; `FooRMSNorm.forward` is at hand."""
    return type(name, (FooRMSNorm,), {"forward": forward, "__doc__": doc, "__module__": __name__})


def _rms(self: FooRMSNorm, h: Tensor) -> Tensor:
    return FooRMSNorm.forward(self, h)


def _centred(self: FooRMSNorm, h: Tensor) -> Tensor:
    c = h - h.mean(-1, keepdim=True)
    return self.weight * c / (c.square().sum(-1, keepdim=True) / (h.shape[-1] - 1) + 1e-6).sqrt()


def _by_product(self: FooRMSNorm, h: Tensor) -> Tensor:
    squares = (h.unsqueeze(-2) @ h.unsqueeze(-1)).squeeze(-1)
    return self.weight * h * torch.rsqrt(squares / h.shape[-1] + self.variance_epsilon)


def _detached(self: FooRMSNorm, h: Tensor) -> Tensor:
    return self.weight * h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).detach()


Centred = _like("Centred", _centred, "Divides by the standard deviation with N − 1, as older layer norms do.")
Unlike = _like("Unlike", lambda self, h: self.weight * nn.functional.normalize(h, p=1, dim=-1))
Detached = _like("Detached", _detached, "The same output, another gradient.")
Widening = _like("Widening", lambda self, h: _rms(self, h.float()))
Noisy = _like("Noisy", lambda self, h: nn.functional.dropout(_rms(self, h), 0.5, self.training))
ByProduct = _like("ByProduct", _by_product, "Autocast would compute the sum of squares in bf16.")


class Counting(FooRMSNorm):
    """Its forward writes to the module."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.seen: list[int] = []
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen.append(hidden.numel())
        self.calls += 1
        self.register_buffer("last", hidden)
        return super().forward(hidden)


class ChannelsFirst(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Gated(FooRMSNorm):
    def forward(self, hidden: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(hidden if gate is None else hidden * gate)


class Saves(FooRMSNorm):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 2}


class NoEps(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class NoEpsNorm(NoEps):
    pass


class L2Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=-1)


def altered(norm: nn.Module, change: Callable[[Any], object]) -> nn.Module:
    change(norm)
    return norm


class Quantised(nn.Parameter):
    pass


def swap(model: nn.Module, **options: Any) -> onepass.SwapReport:
    """`onepass.swap` for models with the classes of this file."""
    own = [cls for cls in globals().values() if isinstance(cls, type) and cls.__module__ == __name__]
    return onepass.swap(model, also=[c for c in own if issubclass(c, nn.Module) and c not in (NoEps, Tiny)], **options)

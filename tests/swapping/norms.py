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


class Centred(FooRMSNorm):
    """Divides by the standard deviation with N − 1, as older layer norms do."""

    def forward(self, hidden: Tensor) -> Tensor:
        centred = hidden - hidden.mean(-1, keepdim=True)
        return self.weight * centred / (centred.square().sum(-1, keepdim=True) / (hidden.shape[-1] - 1) + 1e-6).sqrt()


class OutsideEps(FooRMSNorm):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * hidden / (hidden.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class Unbiased(FooRMSNorm):
    def forward(self, hidden: Tensor) -> Tensor:
        n = hidden.shape[-1]
        return super().forward(hidden) * ((n - 1) / n) ** 0.5


class Unlike(FooRMSNorm):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * torch.nn.functional.normalize(hidden, p=1, dim=-1)


class Detached(FooRMSNorm):
    """The same output, another gradient."""

    def forward(self, hidden: Tensor) -> Tensor:
        r = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * hidden * r.detach()


class Widening(FooRMSNorm):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.float())


class Flat(FooRMSNorm):
    """Another function of two dimensions."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden if hidden.dim() == 2 else super().forward(hidden)


class ByGradMode(FooRMSNorm):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * (1 if torch.is_grad_enabled() else 2)


class OtherIn16Bits(FooRMSNorm):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * (1 if hidden.dtype == torch.float32 else 1.03)


class Noisy(FooRMSNorm):
    """Another function in training mode, and one that draws random numbers."""

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(hidden), 0.5, self.training)


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


class ByProduct(FooRMSNorm):
    """Autocast would compute the sum of squares in bf16."""

    def forward(self, hidden: Tensor) -> Tensor:
        squares = (hidden.unsqueeze(-2) @ hidden.unsqueeze(-1)).squeeze(-1)
        return self.weight * hidden * torch.rsqrt(squares / hidden.shape[-1] + self.variance_epsilon)


class ChannelsFirst(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Gain(FooRMSNorm):
    """Constrains its gain: another function of negative or large weights."""

    def __init__(self, dim: int, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__(dim)
        self.of_weight = of

    def forward(self, hidden: Tensor) -> Tensor:
        h = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.of_weight(self.weight) * h


class Guarded(FooRMSNorm):
    """Changes its input first: another function of large or missing values."""

    def __init__(self, dim: int, guard: Callable[[Tensor], Tensor]) -> None:
        super().__init__(dim)
        self.guard = guard

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(self.guard(hidden))


class OfChannels(nn.LayerNorm):
    """Takes the second of four dimensions for channels where it has their number."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() == 4 and input.shape[1] == self.normalized_shape[0]:
            return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return super().forward(input)


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


def with_forward() -> nn.Module:
    norm = nn.LayerNorm(16)
    norm.forward = lambda x: 2 * x  # type: ignore[method-assign]
    return norm


def with_buffer() -> nn.Module:
    norm = FooRMSNorm(16)
    norm.register_buffer("count", torch.zeros(1))
    return norm


def with_child() -> nn.Module:
    norm = FooRMSNorm(16)
    norm.inner = nn.Linear(16, 16)
    return norm


def with_eps(eps: Any) -> nn.Module:
    norm = nn.LayerNorm(16)
    norm.eps = eps
    return norm


def with_parameter(p: Any) -> nn.Module:
    norm = FooRMSNorm(16)
    norm.weight = p
    return norm


def compiled() -> nn.Module:
    norm = nn.LayerNorm(16)
    norm.compile(backend="eager")
    return norm


class Quantised(nn.Parameter):
    pass


def swap(model: nn.Module, **options: Any) -> onepass.SwapReport:
    """`onepass.swap` for models with the classes of this file."""
    own = [cls for cls in globals().values() if isinstance(cls, type) and cls.__module__ == __name__]
    return onepass.swap(model, also=[c for c in own if issubclass(c, nn.Module) and c not in (NoEps, Tiny)], **options)

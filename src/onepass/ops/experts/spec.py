"""The contract of `experts`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from onepass.core.spec import BadCall, Sample, Spec

from . import definition
from .op import expert_order, experts

# name, tokens, dim, hidden, experts, k, share of choices that are no expert's
_CASES = (
    ("experts", 40, 16, 24, 5, 2, 0.2),
    ("one token", 1, 8, 16, 3, 2, 0.0),
    ("one expert", 140, 8, 8, 1, 1, 0.0),
    ("every expert", 7, 8, 16, 4, 4, 0.0),
    ("wide", 3, 264, 136, 2, 1, 0.0),
    ("wide tiles", 5, 512, 136, 3, 2, 0.2),
    ("one column", 3, 1, 1, 2, 1, 0.0),
    ("no expert", 5, 8, 8, 3, 2, 1.0),
    ("no tokens", 0, 8, 16, 3, 2, 0.0),
)


def _indices(tokens: int, n_experts: int, k: int, none: float, device: Any) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    chosen = torch.rand(tokens, n_experts, generator=generator).topk(k, -1).indices
    return chosen.masked_fill(torch.rand(tokens, k, generator=generator) < none, -1).to(device)


def _samples(make: Callable[..., Tensor]) -> Iterator[Sample]:
    for name, tokens, dim, hidden, n_experts, k, none in _CASES:
        x = make(tokens, dim)
        if x.is_cuda and x.element_size() == 2 and dim % 8:
            x, dim, hidden = make(tokens, 8), 8, 8
        up, down = make(n_experts, dim, hidden) / dim**0.5, make(n_experts, hidden, dim) / hidden**0.5
        indices, weights = _indices(tokens, n_experts, k, none, x.device), make(tokens, k)
        yield Sample(name, (x, indices, weights, up, down))
        if name in ("experts", "wide tiles"):
            up = torch.cat((make(n_experts, dim, hidden) / dim**0.5, up), 2)
            yield Sample(f"{name}, swiglu", (x, indices.int(), weights, up, down), {"activation": "swiglu"})


_X, _I, _W = torch.ones(4, 8), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)
_UP, _DOWN = torch.ones(3, 8, 16), torch.ones(3, 16, 8)


def _bad(name: str, error: type[Exception], match: str, *args: Any, **options: Any) -> BadCall:
    return BadCall(name, lambda: experts(*args, **options), error, match)


def _odd_width() -> Tensor:
    with FakeTensorMode():
        x, up, down = (torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in ((4, 12), (3, 12, 16), (3, 16, 12)))
        indices, weights = (torch.empty(4, 2, dtype=dtype, device="cuda") for dtype in (torch.int64, torch.bfloat16))
        return experts(x, indices, weights, up, down)


_BAD_CALLS = (
    _bad("3-d x", ValueError, r"x must be \(tokens, dim\)", _X[None], _I, _W, _UP, _DOWN),
    _bad("list", TypeError, "x must be a tensor, got list", [1.0], _I, _W, _UP, _DOWN),
    _bad("width", ValueError, r"up must be \(experts, dim = 8, hidden\), got", _X, _I, _W, _UP[:, 1:], _DOWN),
    _bad("down", ValueError, r"down must be \(3, 16, 8\) beside", _X, _I, _W, _UP, _DOWN[:2]),
    _bad("dtypes", TypeError, "x is torch.float32 and up is torch.float64; pass", _X, _I, _W, _UP.double(), _DOWN),
    _bad("float indices", TypeError, "indices must be int32 or int64", _X, _I.float(), _W, _UP, _DOWN),
    _bad("tokens", ValueError, r"indices and weights must be \(tokens = 4, k\)", _X, _I[1:], _W[1:], _UP, _DOWN),
    _bad("range", ValueError, "−1 .no expert. or 0 … 2, got 3", _X, _I + 3, _W, _UP, _DOWN),
    _bad("act", ValueError, "activation must be 'gelu' or 'swiglu', got 'no'", _X, _I, _W, _UP, _DOWN, activation="no"),
    _bad("no gate", ValueError, "dim, 2·hidden.* pass torch.cat", _X, _I, _W, _UP, _DOWN, activation="swiglu"),
    BadCall("odd width", _odd_width, ValueError, "multiples of 8 in torch.bfloat16 on a GPU, got 12 and 16; append"),
    BadCall("order", lambda: expert_order(_I[0], 3), ValueError, r"indices must be \(tokens, k\)"),
)

SPECS = [Spec("experts", experts, definition.experts, _samples, _BAD_CALLS)]

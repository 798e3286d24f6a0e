"""Samples and bad calls of `qk_norm_rope`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from onepass.core.spec import BadCall, Sample, Spec

from . import definition
from .op import MAX_HEAD, qk_norm_rope


def _samples(make: Callable[..., Tensor]) -> Iterator[Sample]:
    def sample(name: str, lead: tuple[int, ...], heads: tuple[int, int], d: int, rotary: int, **options: Any) -> Sample:
        q, k, _ = torch.split(make(*lead, 2 * heads[1] + heads[0], d), [*heads, heads[1]], -2)
        # one token takes a short table: the tests of batches try small samples alone
        angles = make(9 if lead[-1] > 1 else 2, rotary // 2)
        weights = {} if options.pop("bare", False) else {"q_weight": make(d), "k_weight": make(d)}
        return Sample(name, (q, k), {**weights, "cos": angles.cos(), "sin": angles.sin(), **options})

    device = make(1).device
    each = torch.tensor([[8, 0, 3], [1, 1, 2]], device=device)
    yield sample("rows of a packed projection", (2, 3), (4, 2), 8, 8)
    yield sample("interleaved, positions", (2, 3), (4, 2), 8, 8, interleaved=True, positions=each)
    yield sample("odd width, partly rotated", (3,), (2, 1), 13, 6, positions=each[1])
    yield sample("interleaved, partly rotated, offset", (2, 3), (1, 1), 10, 4, interleaved=True, offset=1.0)
    yield sample("many heads", (2, 9), (6, 3), 80, 80)
    yield sample("two columns, one token, no weights", (1,), (1, 1), 2, 2, bare=True)
    yield sample("no tokens", (2, 0), (2, 1), 4, 4)
    yield sample("no heads of keys", (2, 3), (2, 0), 4, 4)


def _bad_calls() -> Iterator[BadCall]:
    q, k, w, c = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 2, 8), torch.ones(8), torch.ones(5, 4)

    def call(**changed: Any) -> Callable[[], Any]:
        arguments = {"q": q, "k": k, "q_weight": w, "k_weight": w, "cos": c, "sin": c} | changed
        return lambda: qk_norm_rope(**arguments)

    yield BadCall("list", call(q=[1.0]), TypeError, "q must be a tensor, got list")
    yield BadCall("2-d q", call(q=w[None]), ValueError, r"q must be \(..., tokens, heads, D\), got \(1, 8\)")
    yield BadCall("k", call(k=k[:1]), ValueError, r"k must have the shape of q.*got \(1, 3, 2, 8\)")
    yield BadCall("weight", call(k_weight=w[:3]), ValueError, r"k_weight must be \(8,\).*got \(3,\)")
    yield BadCall("wide angles", call(cos=torch.ones(5, 5), sin=torch.ones(5, 5)), ValueError, "R ≤ 8 rotated columns")
    yield BadCall("sin", call(sin=c[:2]), ValueError, r"got \(5, 4\) and \(2, 4\)")
    yield BadCall("few", call(cos=c[:2], sin=c[:2]), ValueError, "cos and sin have 2 positions, q has 3 tokens")
    yield BadCall("float positions", call(positions=torch.ones(3)), TypeError, "positions must be int32 or int64")
    yield BadCall("positions", call(positions=torch.arange(2)), ValueError, r"\(3,\) or \(2, 3\); got \(2,\)")
    yield BadCall("outside", call(positions=torch.arange(3) + 3), ValueError, "from 0 to 4; got 3 to 5")
    yield BadCall("negative", call(positions=torch.arange(3) - 1), ValueError, "from 0 to 4; got -1 to 1")
    wide = dict.fromkeys("qk", torch.ones(1, 1, 1, 1025))
    yield BadCall("wide heads", call(**wide), ValueError, "1024 columns, got 1025; norm them by rms_norm, then")
    yield BadCall("offset", call(offset=None), TypeError, "offset must be a number, got NoneType")
    yield BadCall("eps", call(eps=-1.0), ValueError, "eps must be ≥ 0, got -1.0")
    yield BadCall("device", call(q_weight=w.to("meta")), ValueError, "q_weight is on meta but q is on cpu")


def _of_rows(make: Callable[..., Tensor], n: int) -> Mapping[str, Callable[[Tensor], Any]]:
    angles, w = make(1, max(n // 2, 1)), make(n)

    def rotated(x: Tensor) -> Any:
        # a row is a head; one column has no pair
        if not 1 < n <= MAX_HEAD:
            return x.square()
        at = torch.zeros(len(x), dtype=torch.long, device=x.device)
        heads = x[:, None]
        q, k = qk_norm_rope(heads, heads, w, None, cos=angles.cos(), sin=angles.sin(), positions=at)
        return q[:, 0], k[:, 0]

    return {"qk_norm_rope": rotated}


SPECS = [Spec("qk_norm_rope", qk_norm_rope, definition.forward, _samples, tuple(_bad_calls()), of_rows=_of_rows)]

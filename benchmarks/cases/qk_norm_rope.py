"""Bench cases of qk_norm_rope, beside torch.compile of the composition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Case
from benchmarks.cases.norm_options import BF16, case, rms
from onepass.ops.qk_norm_rope.op import qk_norm_rope


def _cases(tokens: int, heads: tuple[int, int], d: int, interleaved: bool, device: str) -> list[Case]:
    def turn(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n = rms(x, w)
        a, b = (n[..., ::2], n[..., 1::2]) if interleaved else n.chunk(2, -1)
        pair = a * cos - b * sin, b * cos + a * sin
        return (torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)).to(x.dtype)

    def setup() -> Any:
        qkv = torch.randn(1, tokens, heads[0] + 2 * heads[1], d, device=device, dtype=BF16)
        q, k = (t.detach() for t in qkv.split((*heads, heads[1]), -2)[:2])  # type: ignore[no-untyped-call]
        wq, wk = (torch.randn(d, device=device, dtype=BF16) for _ in range(2))
        angles = torch.arange(tokens, device=device)[:, None] * 10000.0 ** -torch.linspace(0, 1, d // 2, device=device)
        cos, sin = angles.cos(), angles.sin()
        composed = torch.compile(
            lambda q, k, wq, wk: tuple(turn(t, w, cos[:, None], sin[:, None]) for t, w in ((q, wq), (k, wk)))
        )
        return {
            "onepass": lambda: qk_norm_rope(q, k, wq, wk, cos=cos, sin=sin, interleaved=interleaved),
            "torch.compile": lambda: composed(q, k, wq, wk),
        }, [q, k, wq, wk]

    size = 2 * tokens * sum(heads) * d
    tables = 4 * tokens * d
    params = {"tokens": tokens, "heads": heads[0], "kv_heads": heads[1], "d": d, "interleaved": interleaved}
    floors = {"forward": 2 * size + tables, "backward": 3 * size + tables}
    return case("qk_norm_rope", params, floors, setup, device)


CASES = [
    found
    for interleaved in (False, True)
    for tokens, heads, d, device in (
        (4096, (32, 8), 128, "cuda"),
        (65536, (32, 8), 128, "cuda"),
        (256, (4, 2), 64, "cpu"),
    )
    for found in _cases(tokens, heads, d, interleaved, device)
]

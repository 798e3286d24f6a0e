"""Bench cases of the norms' options, beside torch.compile of the composition and rivals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Case, Impl, Timed, rival, staged
from onepass.ops.norm.definition import to_e4m3
from onepass.ops.norm.op import layer_norm, rms_norm

BF16 = torch.bfloat16
# implementations by name, and the tensors that need gradients
Setup = Callable[[], tuple[dict[str, Timed], list[Tensor]]]


def case(op: str, params: Mapping[str, Any], floors: Mapping[str, int], setup: Setup, device: str) -> list[Case]:
    """Return the cases of forward and, where `floors` has it, backward; a floor is the bytes that must move."""

    def make(stage: str) -> Mapping[str, Impl]:
        return staged(stage, *setup())

    return [Case(op, stage, params, BF16, floor, partial(make, stage), 5e-2, device) for stage, floor in floors.items()]


def rms(x: Tensor, w: Tensor | None) -> Tensor:
    """Return the RMS norm in fp32."""
    f = x.float()
    n = f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6)
    return n if w is None else n * w.float()


def _heads(tokens: int, heads: int, d: int, device: str) -> list[Case]:
    def setup() -> Any:
        x, w = (torch.randn(*shape, heads, d, device=device, dtype=BF16) for shape in ((tokens,), ()))
        composed = torch.compile(lambda x, w: rms(x, w).to(x.dtype))
        return {
            "onepass": lambda: rms_norm(x, w, eps=1e-6),
            "torch.compile": lambda: composed(x, w),
            "quack": rival("quack.rmsnorm", lambda m: lambda: m.rmsnorm(x, w, eps=1e-6)),
        }, [x, w]

    size = 2 * tokens * heads * d
    params = {"what": "weights per head", "rows": tokens * heads, "cols": d}
    return case("norm_options", params, {"forward": 2 * size, "backward": 3 * size}, setup, device)


def _adaptive(batch: int, tokens: int, cols: int, device: str) -> list[Case]:
    def setup() -> Any:
        x = torch.randn(batch, tokens, cols, device=device, dtype=BF16)
        scale, shift = (torch.randn(batch, 1, cols, device=device, dtype=BF16) for _ in range(2))
        composed = torch.compile(lambda x, s, t: F.layer_norm(x, (cols,)) * (1 + s) + t)
        return {
            "onepass": lambda: layer_norm(x, scale, shift, offset=1.0),
            "torch.compile": lambda: composed(x, scale, shift),
        }, [x, scale, shift]

    size = 2 * batch * tokens * cols
    params = {"what": "adaptive", "rows": batch * tokens, "cols": cols}
    return case("norm_options", params, {"forward": 2 * size, "backward": 3 * size}, setup, device)


def _gated(rows: int, cols: int, first: bool, groups: int, device: str) -> list[Case]:
    def compose(x: Tensor, z: Tensor, w: Tensor) -> Tensor:
        f, g = x.float(), F.silu(z.float())
        f = (f * g if first else f).unflatten(-1, (groups, -1))  # type: ignore[no-untyped-call]
        y = rms(f, None).flatten(-2) * w.float()
        return (y if first else y * g).to(x.dtype)

    def setup() -> Any:
        x, z = (torch.randn(rows, cols, device=device, dtype=BF16) for _ in range(2))
        w = torch.randn(cols, device=device, dtype=BF16)
        composed = torch.compile(compose)
        impls: dict[str, Any] = {
            "onepass": lambda: rms_norm(x, w, gate=z, gate_first=first, groups=groups, eps=1e-6),
            "torch.compile": lambda: composed(x, z, w),
        }
        if not first and groups == 1:
            call: Any = lambda m: lambda: m.rms_norm_gated(x, z, w, None, eps=1e-6)  # noqa: E731
            impls["flash-linear-attention"] = rival("fla.modules.norm.fused_norm_gate", call)
        return impls, [x, z, w]

    size = 2 * rows * cols
    params = {"what": "gate first" if first else "gate", "rows": rows, "cols": cols, "groups": groups}
    return case("norm_options", params, {"forward": 3 * size, "backward": 5 * size}, setup, device)


def _twice(rows: int, cols: int, device: str) -> list[Case]:
    def setup() -> Any:
        x, w = (torch.randn(*shape, device=device, dtype=BF16) for shape in ((rows, cols), (cols,)))
        composed = torch.compile(lambda x, w: w * rms(x, None).to(x.dtype))

        def liger(m: Any) -> Callable[[], Any]:
            # in_place=False: all implementations share one upstream gradient, which in_place would overwrite
            return lambda: m.LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False)

        return {
            "onepass": lambda: rms_norm(x, w, rounding="twice", eps=1e-6),
            "torch.compile": lambda: composed(x, w),
            "liger": rival("liger_kernel.ops.rms_norm", liger),
        }, [x, w]

    size = 2 * rows * cols
    params = {"what": "rounded twice", "rows": rows, "cols": cols}
    return case("norm_options", params, {"forward": 2 * size, "backward": 3 * size}, setup, device)


def _wide_stream(rows: int, cols: int, device: str) -> list[Case]:
    def setup() -> Any:
        x, w = (torch.randn(*shape, device=device, dtype=BF16) for shape in ((rows, cols), (cols,)))
        r = torch.randn(rows, cols, device=device)

        def compose(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            s = x + r
            return rms(s, w).to(x.dtype), s

        composed = torch.compile(compose)

        def quack(m: Any) -> Callable[[], Any]:
            return lambda: m.rmsnorm(
                x, w, residual=r, out_dtype=BF16, residual_dtype=torch.float32, eps=1e-6, prenorm=True
            )

        return {
            "onepass": lambda: rms_norm(x, w, residual=r, eps=1e-6),
            "torch.compile": lambda: composed(x, r, w),
            "quack": rival("quack.rmsnorm", quack),
        }, [x, r, w]

    params = {"what": "fp32 stream", "rows": rows, "cols": cols}
    # forward x 2, residual 4, s 4, y 2; backward dy 2, ds 4, s 4, and the gradients of x 2 and residual 4
    floors = {"forward": 12 * rows * cols, "backward": 16 * rows * cols}
    return case("norm_options", params, floors, setup, device)


def _in_8_bits(rows: int, cols: int, by: Any, device: str) -> list[Case]:
    columns = cols if by == "row" else 128

    def setup() -> Any:
        x, w = (torch.randn(*shape, device=device, dtype=BF16) for shape in ((rows, cols), (cols,)))
        composed = torch.compile(lambda x, w: to_e4m3(rms(x, w).to(x.dtype), columns))

        def wide(pair: Any) -> tuple[Tensor, Tensor]:
            return pair[0].view(torch.uint8), pair[1]

        # codes differ by a step where sums were added in another order: as bytes they compare within the check
        return {
            "onepass": lambda: wide(rms_norm(x, w, quantize=by, eps=1e-6)),
            "norm, then torch.compile": lambda: wide(composed(x, w)),
        }, [x, w]

    params = {"what": f"e4m3 by {by}", "rows": rows, "cols": cols}
    floor = rows * (3 * cols + 4 * (cols // columns))
    return case("norm_options", params, {"forward": floor}, setup, device)


def _cases(device: str) -> list[Case]:
    cases = [*_heads(8192, 32, 128, device), *_adaptive(64, 1024, 1152, device), *_adaptive(16, 1024, 4096, device)]
    for cols in (4096, 8192):
        cases += _gated(16384, cols, False, 1, device) + _gated(16384, cols, True, 1, device)
        cases += _twice(16384, cols, device) + _wide_stream(16384, cols, device)
        cases += _in_8_bits(16384, cols, "row", device) + _in_8_bits(16384, cols, "block", device)
    cases += _gated(16384, 8192, True, 8, device) + _gated(262144, 128, False, 1, device)
    return cases


CASES = _cases("cuda")
RIVALS = {"fla": "flash-linear-attention"}

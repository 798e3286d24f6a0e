"""Kernel budgets of the norms' options, at the widths that models use them with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from codegen.kernel import Kernel, i32, kernel, pointers
from onepass.ops.norm import launch

_SHARED_BYTES = 232448  # of an H200
_NUMBERS = {"eps": "fp32", "offset": "fp32", **i32("n_rows", "z_row_stride", "repeat", "n_entries", "x_row_stride")}
_FORWARD = ("x", "r", "w", "b", "y", "s", "stats", "z", "codes", "scales")
_BACKWARD = ("dy", "ds", "x", "w", "stats", "dx", "partials", "z", "b", "dz", "copy")
_FP32 = ("stats", "scales", "partials")


def _arguments(t: str, names: tuple[str, ...], given: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return signature and constants of the pointers: those that are not given are None."""
    types = {n: "*fp32" if n in _FP32 else "*fp8e4nv" if n == "codes" else f"*{t}" for n in names}
    return {f"{n}_ptr": types[n] for n in given.split()}, {f"{n}_ptr": None for n in names if n not in given.split()}


def _forward(t: str, what: str, cols: int, given: str, **options: Any) -> Kernel:
    size = 2 if t == "bf16" else 4
    tile = launch.forward_tile(cols, size, options.get("GATE", 0) > 0, options.get("QUANT", 0) > 0)
    signature, absent = _arguments(t, _FORWARD, given)
    constants = {"HAS_MEAN": False, "STABLE": False, "TABLE": False, "TWICE": False, "GATE": 0, "QUANT": 0} | options
    early = launch.forward_early(cols, size, constants["TABLE"], False)
    shape = {"N_COLS": cols, "VEC": 8, "BLOCK_R": tile.rows, "BLOCK_C": tile.cols, "EARLY": early}
    return Kernel(
        f"norm forward {t} N={cols} {what}", kernel("ops.norm.kernels", "forward_kernel"),
        signature | _NUMBERS | i32("r_row_stride"), constants | shape | absent, pointers(signature),
        num_warps=tile.warps, max_registers=128 if early else 96, least_arch=89 if "codes" in given else 80,
        amd="codes" not in given,
    )  # fmt: skip


def _backward(t: str, what: str, cols: int, given: str, **options: Any) -> Kernel:
    gate = options.get("GATE", 0)
    constants = {
        "HAS_MEAN": False,
        "STABLE": False,
        "TABLE": False,
        "GATE": 0,
        "NEED_W": True,
        "NEED_B": False,
    } | options
    tile = launch.backward_tile(
        cols, 2 if t == "bf16" else 4, 2 + bool(gate), _SHARED_BYTES, False, 1 + constants["NEED_B"], gate,
        16 if constants["TABLE"] else 1,
    )  # fmt: skip
    signature, absent = _arguments(t, _BACKWARD, given)
    shape = {"N_COLS": cols, "VEC": 8, "BLOCK_R": tile.rows, "BLOCK_C": tile.cols, "STAGES": tile.stages}
    return Kernel(
        f"norm backward {t} N={cols} {what}", kernel("ops.norm.kernels", "backward_kernel"),
        signature | _NUMBERS | i32("dy_row_stride", "ds_row_stride"), constants | shape | absent, pointers(signature),
        # a gate before the norm keeps x and itself for dz: 32 elements per thread take all registers, and a few more
        num_warps=tile.warps, max_registers=128 if tile.warps > 8 else 255 if gate == 2 and cols > 4096 else 192,
        max_amd_spills=52, max_spill_bytes=64 if gate == 2 and cols == 8192 else 0,
        # False for chunks of 4 16-bit elements per thread, as without options
        vector_loads=tile.rows * tile.cols * (2 if t == "bf16" else 4) >= 16 * 32 * tile.warps,
    )  # fmt: skip


def _kernels() -> Iterator[Kernel]:
    for t in ("bf16", "fp32"):
        yield _forward(t, "weights per head", 128, "x w y stats", TABLE=True)
        yield _forward(t, "adaptive", 1152, "x w b y stats", TABLE=True, HAS_MEAN=True)
        yield _backward(t, "weights per head", 128, "dy x w stats dx partials", TABLE=True)
        yield _backward(t, "adaptive", 1152, "dy x w stats dx partials", TABLE=True, HAS_MEAN=True, NEED_B=True)
        yield _backward(t, "adaptive", 4096, "dy x w stats dx partials", TABLE=True, HAS_MEAN=True, NEED_B=True)
        for cols in (128, 8192) if t == "bf16" else (4096,):
            yield _forward(t, "gate", cols, "x w y stats z", GATE=1)
            yield _forward(t, "gate first", cols, "x w y stats z", GATE=2)
            yield _backward(t, "gate by sigmoid", cols, "dy x w stats dx partials z dz", GATE=5)
            yield _backward(t, "gate first", cols, "dy x w stats dx partials z dz", GATE=2)
        yield _forward(t, "rows in 8 bits", 8192, "x w stats codes scales", QUANT=1)
        yield _forward(t, "blocks in 8 bits", 8192, "x w stats codes scales", QUANT=2)
    codes = _forward("bf16", "codes of rows in 8 bits", 4096, "x w stats codes scales", QUANT=1)
    yield dataclasses.replace(codes, signature={**codes.signature, "codes_ptr": "*u8"}, least_arch=80, amd=True)
    stream = _backward("fp32", "bf16 beside an fp32 stream", 4096, "dy ds x w stats dx partials copy")
    mixed = {f"{n}_ptr": "*bf16" for n in ("dy", "w", "copy")}
    yield dataclasses.replace(stream, signature={**stream.signature, **mixed})
    yield _forward("bf16", "rounded twice", 4096, "x w y stats", TWICE=True)


KERNELS = list(_kernels())

__all__ = ["KERNELS"]

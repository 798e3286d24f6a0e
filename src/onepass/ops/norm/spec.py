"""Samples, bad calls, kernel budgets and bench cases of `layer_norm` and `rms_norm`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from onepass.core.spec import BadCall, Kernel, Sample, Spec

from . import reference, shapes
from .cases import CASES, RIVALS
from .op import backward_op, forward_op, forward_residual_op, layer_norm, rms_norm


def _shared_samples(make: Callable[..., Tensor]) -> Iterator[Sample]:
    yield Sample("vector", (make(33), make(33)))
    yield Sample("rows, no weight", (make(6, 10),))
    yield Sample("rows, weight", (make(6, 10), make(10)))
    yield Sample("one row", (make(1, 10), make(10)))
    yield Sample("one row, residual", (make(10), make(10)), {"residual": make(10)})
    yield Sample("one column", (make(5, 1), make(1)))
    yield Sample("one element", (make(1, 1), make(1)))
    yield Sample("3-d, odd width", (make(2, 3, 33), make(33)))
    yield Sample("many narrow rows", (make(300, 5), make(5)))
    yield Sample("width of several chunks", (make(5, 700), make(700)))
    yield Sample("one row per program", (make(2, 3000), make(3000)))
    yield Sample("residual", (make(4, 40), make(40)), {"residual": make(4, 40)})
    yield Sample("residual, no weight", (make(2, 3, 7),), {"residual": make(2, 3, 7)})
    yield Sample("no rows", (make(0, 4), make(4)))
    yield Sample("no rows, residual", (make(2, 0, 4), make(4)), {"residual": make(2, 0, 4)})
    yield Sample("no columns", (make(3, 0), make(0)))


def _ties(make: Callable[..., Tensor], rows: int, cols: int) -> Tensor:
    """Return whole numbers with ties at the top: rows of either sign, rows whose maximum is 0, rows of zeros.

    Samples with ties are larger than gradcheck takes (300 elements): finite differences are wrong at a tie.
    """
    x = (2 * make(rows, cols)).round()
    x[1::4] = -x[1::4].abs() - 1
    x[2::4] = -x[2::4].abs()
    x[3::4] = 0
    return x


def _layer_norm_samples(make: Callable[..., Tensor]) -> Iterator[Sample]:
    yield from _shared_samples(make)
    yield Sample("weight and bias", (make(6, 10), make(10), make(10)))
    yield Sample("bias alone", (make(6, 10), None, make(10)))
    yield Sample("all, residual", (make(2, 3, 100), make(100), make(100)), {"residual": make(2, 3, 100), "eps": 0.1})
    yield Sample("backward in tiles", (make(2, 8200), make(8200), make(8200)))
    for eps in (1e-5, 0.1):
        options = {"stable": True, "eps": eps}
        yield Sample(f"stable, eps={eps}", (make(6, 33), make(33), make(33)), options)
        yield Sample(f"stable, ties, eps={eps}", (_ties(make, 9, 40), make(40), make(40)), options)
    residual = _ties(make, 8, 20)
    yield Sample("stable, residual", (_ties(make, 8, 20), make(20)), {"stable": True, "eps": 0.1, "residual": residual})


def _rms_norm_samples(make: Callable[..., Tensor]) -> Iterator[Sample]:
    yield from _shared_samples(make)
    yield Sample("offset", (make(6, 10), make(10)), {"offset": 1.0, "eps": 1e-3})
    yield Sample("offset, residual", (make(3, 130), make(130)), {"offset": 1.0, "residual": make(3, 130)})
    yield Sample("backward in tiles", (make(2, 8200), make(8200)))


def _opchecks(has_mean: bool, stable: bool = False) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    x = torch.randn(2, 3, 10, requires_grad=True)
    w = torch.randn(10, requires_grad=True)
    b = torch.randn(10, requires_grad=True) if has_mean else None
    options = (1e-5, 0.0 if has_mean else 1.0, has_mean, stable)
    yield forward_op, (x, w, b, *options)
    yield forward_op, (x, None, None, *options)
    yield forward_residual_op, (x, torch.randn(2, 3, 10, requires_grad=True), w, b, *options)
    saved = x.detach(), forward_op(x.detach(), w.detach(), None, *options)[1], w.detach(), torch.float32, *options
    yield backward_op, (torch.randn(2, 3, 10), None, *saved, True, True, has_mean)
    yield backward_op, (torch.randn(2, 3, 10), torch.randn(2, 3, 10), *saved, True, False, False)


def _bad_calls(op: Callable[..., Any], name: str) -> Iterator[BadCall]:
    x, w = torch.ones(2, 3), torch.ones(3)
    yield BadCall("width", lambda: op(x, torch.ones(4)), ValueError, rf"{name}: weight must be \(3,\).*\(4,\)")
    yield BadCall("2-d weight", lambda: op(x, torch.ones(1, 3)), ValueError, r"weight must be \(3,\).*\(1, 3\)")
    yield BadCall("0-d x", lambda: op(torch.ones(())), ValueError, "at least one dimension")
    yield BadCall("integer x", lambda: op(torch.ones(2, 3, dtype=torch.int64)), TypeError, "x must be float.*int64")
    yield BadCall("list", lambda: op([1.0]), TypeError, "x must be a tensor, got list")
    yield BadCall(
        "residual", lambda: op(x, w, residual=w), ValueError, r"residual must have the shape.*\(2, 3\).*\(3,\)"
    )
    yield BadCall("eps", lambda: op(x, w, eps=-1.0), ValueError, "eps must be ≥ 0, got -1.0")
    yield BadCall("eps nan", lambda: op(x, w, eps=math.nan), ValueError, "eps must be ≥ 0, got nan")
    yield BadCall("eps None", lambda: op(x, w, eps=None), TypeError, "eps must be a number ≥ 0, got NoneType")
    yield BadCall("weight list", lambda: op(x, [1.0] * 3), TypeError, "weight must be a tensor, got list")
    yield BadCall("device", lambda: op(x, w.to("meta")), ValueError, "weight is on meta but x is on cpu")


_LAYER_NORM_BAD = (
    *_bad_calls(layer_norm, "layer_norm"),
    BadCall(
        "bias", lambda: layer_norm(torch.ones(2, 3), bias=torch.ones(2)), ValueError, r"bias must be \(3,\).*\(2,\)"
    ),
)


def _layer_norm_rows(make: Callable[..., Tensor], n: int) -> Mapping[str, Callable[[Tensor], Any]]:
    w, b = make(n), make(n)
    return {
        "layer_norm": lambda x: layer_norm(x, w, b),
        "layer_norm, no vectors": layer_norm,
        "layer_norm, fp32 vectors": lambda x: layer_norm(x, w.float(), b.float()),
        "layer_norm, stable": lambda x: layer_norm(x, w, b, stable=True),
        "layer_norm, residual": lambda x: layer_norm(x, w, b, residual=x.flip(-1)),
    }


def _rms_norm_rows(make: Callable[..., Tensor], n: int) -> Mapping[str, Callable[[Tensor], Any]]:
    w = make(n)
    return {
        "rms_norm": lambda x: rms_norm(x, w),
        "rms_norm, no weight": rms_norm,
        "rms_norm, offset": lambda x: rms_norm(x, w, offset=1.0),
        "rms_norm, residual": lambda x: rms_norm(x, w, residual=x.flip(-1)),
    }


SPECS = [
    Spec(
        name="layer_norm",
        op=layer_norm,
        reference=reference.layer_norm,
        samples=_layer_norm_samples,
        bad_calls=_LAYER_NORM_BAD,
        opchecks=lambda: iter((*_opchecks(True), *_opchecks(True, True))),
        of_rows=_layer_norm_rows,
    ),
    Spec(
        name="rms_norm",
        op=rms_norm,
        reference=reference.rms_norm,
        samples=_rms_norm_samples,
        bad_calls=tuple(_bad_calls(rms_norm, "rms_norm")),
        opchecks=lambda: _opchecks(False),
        of_rows=_rms_norm_rows,
    ),
]


def _narrow(name: str) -> Callable[[], Any]:
    def fn() -> Any:
        from . import kernels_triton

        return getattr(kernels_triton, name)

    return fn


def _packed(name: str) -> Callable[[], Any]:
    def fn() -> Any:
        from . import kernels_packed

        return getattr(kernels_packed, name)

    return fn


def _wide(name: str) -> Callable[[], Any]:
    def fn() -> Any:
        from . import kernels_wide

        return getattr(kernels_wide, name)

    return fn


def _team(name: str) -> Callable[[], Any]:
    def fn() -> Any:
        from . import kernels_team

        return getattr(kernels_team, name)

    return fn


def _team_constants(team: shapes.Team) -> dict[str, Any]:
    return {
        "BLOCK_C": team.cols, "TEAM": team.size, "WIDTH": team.width(), "R": team.rows, "LAG": team.lag,
        "STAGES": team.stages, "COOPERATIVE": team.cooperative,
    }  # fmt: skip


_NUMBERS = {"n_rows": "i32", "eps": "fp32", "offset": "fp32"}
_FORWARD_STRIDES = {"x_row_stride": "i32", "r_row_stride": "i32"}
_BACKWARD_STRIDES = {"x_row_stride": "i32", "dy_row_stride": "i32", "ds_row_stride": "i32"}
_DIVISIBLE = (
    *(f"{p}_ptr" for p in ("x", "r", "w", "b", "y", "s", "dy", "ds", "dx", "dw", "db")),
    "stats_ptr",
    "sums_ptr",
    "partials_ptr",
    "words_ptr",
)
_SHARED_BYTES = 232448  # of an H200
# registers that AMD may spill: its sixteen warps of 64 lanes have 128 registers per thread
_AMD_SPILLS = 52


def _kernels() -> Iterator[Kernel]:
    for t, size in (("bf16", 2), ("fp32", 4)):
        pointers = {f"{p}_ptr": f"*{t}" for p in ("x", "r", "w", "b", "y", "s", "dy", "ds", "dx")}
        floats = {f"{p}_ptr": "*fp32" for p in ("stats", "dw", "db", "sums", "partials")}
        forward = {k: pointers[k] for k in ("x_ptr", "w_ptr", "b_ptr", "y_ptr")}
        forward |= {"stats_ptr": "*fp32"} | _FORWARD_STRIDES | _NUMBERS
        backward = {k: pointers[k] for k in ("dy_ptr", "x_ptr", "w_ptr", "dx_ptr")} | _NUMBERS | _BACKWARD_STRIDES
        backward |= {k: floats[k] for k in ("stats_ptr", "partials_ptr")}
        both = {"NEED_W": True, "NEED_B": True}
        plain = {"VEC": 8, "HAS_MEAN": True, "STABLE": False}
        no_residual, no_ds = {"r_ptr": None, "s_ptr": None}, {"ds_ptr": None}

        for cols, registers in (
            (128, 72), (768, 64), (1024, 80), (3000, 128), (4096, 128), (5120, 144), (8192, 128), (16384, 96),
        ):  # fmt: skip
            tile, early = shapes.forward_tile(cols, size), shapes.forward_early(cols, size)
            yield Kernel(
                f"norm forward {t} N={cols}", _narrow("forward_kernel"), forward,
                plain | no_residual | {"N_COLS": cols, "BLOCK_R": tile.rows, "BLOCK_C": tile.cols, "EARLY": early},
                _DIVISIBLE, num_warps=tile.warps, max_registers=registers,
            )  # fmt: skip
        tile = shapes.forward_tile(128, size)
        inference = {k: v for k, v in forward.items() if k != "stats_ptr"}
        yield Kernel(
            f"norm forward {t} N=128 inference", _narrow("forward_kernel"), inference,
            plain | no_residual
            | {"stats_ptr": None, "N_COLS": 128, "BLOCK_R": tile.rows, "BLOCK_C": tile.cols, "EARLY": False},
            _DIVISIBLE, num_warps=tile.warps, max_registers=72,
        )  # fmt: skip
        tile = shapes.forward_tile(32768, size)
        yield Kernel(
            f"norm forward {t} N=32768 stable residual", _narrow("forward_kernel"),
            forward | {k: pointers[k] for k in ("r_ptr", "s_ptr")},
            plain | {"N_COLS": 32768, "STABLE": True, "BLOCK_R": tile.rows, "BLOCK_C": tile.cols, "EARLY": False},
            _DIVISIBLE, num_warps=tile.warps, max_registers=64,
        )  # fmt: skip
        for cols, residual in ((20480, False), (32768, True), (40000, False), (131072, False)) if size == 2 else ():
            packed = shapes.packed(cols)
            assert packed is not None
            sources = {k: pointers[k] for k in ("r_ptr", "s_ptr")} if residual else {}
            words = {"words_ptr": "*i64"} if packed.size > 1 else {}
            absent = ({} if residual else no_residual) | ({} if words else {"words_ptr": None})
            shape = {"BLOCK_C": packed.cols(), "TEAM": packed.size, "WIDTH": packed.width(), "WAITS": False}
            yield Kernel(
                f"norm packed forward {t} N={cols}{' residual' if residual else ''}", _packed("packed_forward_kernel"),
                forward | sources | words | {"zero": "i32"},
                {"N_COLS": cols, "VEC": 8, "HAS_MEAN": True} | shape | absent, _DIVISIBLE, num_warps=packed.warps,
                maxnreg=shapes.PACKED_REGISTERS, max_registers=shapes.PACKED_REGISTERS, amd=False,
            )  # fmt: skip
        # a single program of 8 warps per multiprocessor may use all 255 registers; sm_100 uses the most
        for cols, registers in (
            (128, 192), (768, 224), (1024, 192), (2048, 192), (3000, 224), (4096, 128), (5120, 224), (8192, 128),
        ):  # fmt: skip
            tile = shapes.backward_tile(cols, size, 2, _SHARED_BYTES)
            yield Kernel(
                f"norm backward {t} N={cols}", _narrow("backward_kernel"), backward,
                plain | both | no_ds
                | {"N_COLS": cols, "BLOCK_R": tile.rows, "BLOCK_C": tile.cols, "STAGES": tile.stages},
                _DIVISIBLE, num_warps=tile.warps, max_registers=registers, max_amd_spills=_AMD_SPILLS,
                # False for chunks of 4 16-bit elements per thread: 8-byte loads, yet faster than chunks of 8
                vector_loads=tile.rows * tile.cols * size >= 16 * 32 * tile.warps,
            )  # fmt: skip
        tile = shapes.backward_tile(2048, size, 3, _SHARED_BYTES, stable=True)
        yield Kernel(
            f"norm backward {t} N=2048 stable residual", _narrow("backward_kernel"),
            backward | {"ds_ptr": pointers["ds_ptr"]},
            plain | both
            | {"N_COLS": 2048, "STABLE": True, "BLOCK_R": tile.rows, "BLOCK_C": tile.cols, "STAGES": tile.stages},
            _DIVISIBLE, num_warps=tile.warps, max_registers=256 * 8 // tile.warps, max_amd_spills=_AMD_SPILLS,
        )  # fmt: skip

        for cols in (40000, 65536, 262144):
            forward_team = shapes.forward_team(cols, size, 1, _SHARED_BYTES)
            backward_team = shapes.backward_team(cols, size, 2, _SHARED_BYTES)
            yield Kernel(
                f"norm team forward {t} N={cols}", _team("team_forward_kernel"), forward | {"words_ptr": "*i64"},
                plain | no_residual | {"N_COLS": cols} | _team_constants(forward_team),
                _DIVISIBLE, num_warps=forward_team.warps, max_registers=128, amd=False,
                # w and b of 16384 columns spill a few bytes; still 8 % faster than any shape without spills
                max_spill_bytes=40 if forward_team.cols == 16384 else 0,
            )  # fmt: skip
            yield Kernel(
                f"norm team backward {t} N={cols}", _team("team_backward_kernel"), backward | {"words_ptr": "*i64"},
                plain | both | no_ds | {"N_COLS": cols} | _team_constants(backward_team),
                _DIVISIBLE, num_warps=backward_team.warps, maxnreg=backward_team.registers() or 0, amd=False,
                max_registers=backward_team.registers() or 256 * 8 // backward_team.warps,
                # the rows of two phases fill all registers: 8 bytes spilled on sm_90, 32 on sm_100
                max_spill_bytes=32 if backward_team.lag and size == 2 else 0,
            )  # fmt: skip

        lagging = shapes.forward_team(65536, size, 1, _SHARED_BYTES)
        yield Kernel(
            f"norm team forward {t} N=65536 stable", _team("team_forward_kernel"), forward | {"words_ptr": "*i64"},
            plain | no_residual | {"N_COLS": 65536, "STABLE": True} | _team_constants(lagging),
            _DIVISIBLE, num_warps=lagging.warps, max_registers=128, max_spill_bytes=8, amd=False,
        )  # fmt: skip

        for cols in (32768, 24000, 65536) if size == 2 else (32768, 24000):
            found = shapes.reread(cols, size, 132, 50 << 20)
            assert found is not None
            tile, registers = found
            yield Kernel(
                f"norm rms forward {t} N={cols}", _wide("wide_forward_kernel"),
                {k: v for k, v in forward.items() if k != "b_ptr"},
                plain | no_residual
                | {"b_ptr": None, "HAS_MEAN": False, "N_COLS": cols, "BLOCK_C": tile.cols, "STAGES": tile.stages},
                _DIVISIBLE, num_warps=tile.warps, maxnreg=registers, max_registers=registers, amd=False,
            )  # fmt: skip

        wide = plain | {"N_COLS": 262144}
        yield Kernel(
            f"norm wide forward {t}", _wide("wide_forward_kernel"), forward,
            wide | no_residual | {"BLOCK_C": shapes.WIDE_BYTES // size, "STAGES": shapes.WIDE_STAGES},
            _DIVISIBLE, num_warps=shapes.WIDE_WARPS,
        )  # fmt: skip
        sums = {k: backward[k] for k in ("dy_ptr", "x_ptr", "w_ptr", "stats_ptr", "x_row_stride", "dy_row_stride")}
        yield Kernel(
            f"norm wide sums {t}", _wide("wide_sums_kernel"),
            sums | _NUMBERS | {"sums_ptr": "*fp32", "first_row": "i32"},
            wide | {"BLOCK_C": shapes.SUMS_BYTES // size, "STAGES": shapes.SUMS_STAGES},
            _DIVISIBLE, num_warps=shapes.SUMS_WARPS,
        )  # fmt: skip
        apply = {k: v for k, v in backward.items() if k not in ("eps", "partials_ptr")}
        apply |= {k: floats[k] for k in ("dw_ptr", "db_ptr")}
        yield Kernel(
            f"norm wide apply {t}", _wide("wide_apply_kernel"),
            apply | {"sums_ptr": "*fp32", "first_row": "i32", "group_rows": "i32"},
            wide | no_ds | {"BLOCK_C": shapes.APPLY_COLS, "STAGES": shapes.APPLY_STAGES},
            _DIVISIBLE, num_warps=shapes.APPLY_WARPS,
        )  # fmt: skip
    yield Kernel(
        "norm finish", _narrow("finish_kernel"),
        {"partials_ptr": "*fp32", "dw_ptr": "*bf16", "db_ptr": "*bf16", "n_partials": "i32"},
        {"N_COLS": 8192, "BLOCK_P": 256, "BLOCK_C": 32, "WAITS": False}, _DIVISIBLE, max_registers=192,
    )  # fmt: skip


KERNELS = list(_kernels())

__all__ = ["CASES", "KERNELS", "RIVALS", "SPECS"]

"""What layer_norm and rms_norm promise, what their kernels may cost, what they are measured against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.core.spec import BadCall, Case, Impl, Kernel, Missing, Prepared, Sample, Spec, backward_of, optional

from . import reference, shapes
from .op import backward_op, forward_op, forward_residual_op, layer_norm, rms_norm

RIVALS = {"liger_kernel": "liger-kernel", "quack": "quack-kernels"}


def _shared_samples(make: Callable[..., Tensor]) -> Iterator[Sample]:
    yield Sample("vector", (make(33), make(33)))
    yield Sample("rows, no weight", (make(6, 10),))
    yield Sample("rows, weight", (make(6, 10), make(10)))
    yield Sample("one column", (make(5, 1), make(1)))
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
    """Whole numbers with ties at the top: rows of either sign, rows whose maximum is 0, rows of zeros.

    More than 300 of them: no finite difference has the slope that ties share.
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
    yield BadCall("device", lambda: op(x, w.to("meta")), ValueError, "weight is on meta but x is on cpu")


_LAYER_NORM_BAD = (
    *_bad_calls(layer_norm, "layer_norm"),
    BadCall(
        "bias", lambda: layer_norm(torch.ones(2, 3), bias=torch.ones(2)), ValueError, r"bias must be \(3,\).*\(2,\)"
    ),
)

SPECS = [
    Spec(
        name="layer_norm",
        op=layer_norm,
        reference=reference.layer_norm,
        samples=_layer_norm_samples,
        bad_calls=_LAYER_NORM_BAD,
        opchecks=lambda: iter((*_opchecks(True), *_opchecks(True, True))),
    ),
    Spec(
        name="rms_norm",
        op=rms_norm,
        reference=reference.rms_norm,
        samples=_rms_norm_samples,
        bad_calls=tuple(_bad_calls(rms_norm, "rms_norm")),
        opchecks=lambda: _opchecks(False),
    ),
]


def _narrow(name: str) -> Callable[[], Any]:
    def fn() -> Any:
        from . import kernels_triton

        return getattr(kernels_triton, name)

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
        "STAGES": team.stages,
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
# sixteen warps of 64 lanes leave AMD 128 registers; what is left to spill there
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

        for cols, registers in ((128, 72), (768, 64), (1024, 80), (4096, 64), (5120, 72), (8192, 64), (16384, 96)):
            tile = shapes.forward_tile(cols, size)
            yield Kernel(
                f"norm forward {t} N={cols}", _narrow("forward_kernel"), forward,
                plain | no_residual | {"N_COLS": cols, "BLOCK_R": tile.rows, "BLOCK_C": tile.cols},
                _DIVISIBLE, num_warps=tile.warps, max_registers=registers,
            )  # fmt: skip
        tile = shapes.forward_tile(32768, size)
        yield Kernel(
            f"norm forward {t} N=32768 stable residual", _narrow("forward_kernel"),
            forward | {k: pointers[k] for k in ("r_ptr", "s_ptr")},
            plain | {"N_COLS": 32768, "STABLE": True, "BLOCK_R": tile.rows, "BLOCK_C": tile.cols},
            _DIVISIBLE, num_warps=tile.warps, max_registers=64,
        )  # fmt: skip
        for cols, registers in ((128, 128), (768, 224), (1024, 128), (4096, 128), (5120, 224), (8192, 128)):
            tile = shapes.backward_tile(cols, size, 2, _SHARED_BYTES)
            yield Kernel(
                f"norm backward {t} N={cols}", _narrow("backward_kernel"), backward,
                plain | both | no_ds
                | {"N_COLS": cols, "BLOCK_R": tile.rows, "BLOCK_C": tile.cols, "STAGES": tile.stages},
                _DIVISIBLE, num_warps=tile.warps, max_registers=registers, max_amd_spills=_AMD_SPILLS,
            )  # fmt: skip
        tile = shapes.backward_tile(2048, size, 3, _SHARED_BYTES, stable=True)
        yield Kernel(
            f"norm backward {t} N=2048 stable residual", _narrow("backward_kernel"),
            backward | {"ds_ptr": pointers["ds_ptr"]},
            plain | both
            | {"N_COLS": 2048, "STABLE": True, "BLOCK_R": tile.rows, "BLOCK_C": tile.cols, "STAGES": tile.stages},
            _DIVISIBLE, num_warps=tile.warps, max_amd_spills=_AMD_SPILLS,
        )  # fmt: skip

        for cols in (40000, 65536, 262144):
            forward_team = shapes.forward_team(cols, size, 1, _SHARED_BYTES)
            backward_team = shapes.backward_team(cols, size, 2, _SHARED_BYTES)
            yield Kernel(
                f"norm team forward {t} N={cols}", _team("team_forward_kernel"), forward | {"words_ptr": "*i64"},
                plain | no_residual | {"N_COLS": cols} | _team_constants(forward_team),
                _DIVISIBLE, num_warps=forward_team.warps, max_registers=128, amd=False,
                # w and b of 16384 columns, read once: 8 % faster than any shape without these few
                max_spill_bytes=40 if forward_team.cols == 16384 else 0,
            )  # fmt: skip
            yield Kernel(
                f"norm team backward {t} N={cols}", _team("team_backward_kernel"), backward | {"words_ptr": "*i64"},
                plain | both | no_ds | {"N_COLS": cols} | _team_constants(backward_team),
                _DIVISIBLE, num_warps=backward_team.warps, max_registers=256 * 8 // backward_team.warps, amd=False,
                # two turns of rows fill all registers: none spilled on sm_90, a few on the others
                max_spill_bytes=16 if backward_team.lag and size == 2 else 0,
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
        {"N_COLS": 8192, "BLOCK_P": 256, "BLOCK_C": 32}, _DIVISIBLE, max_registers=192,
    )  # fmt: skip


KERNELS = list(_kernels())


def _layer_norm_rivals(x: Tensor, w: Tensor, b: Tensor) -> dict[str, Callable[[], Tensor] | Missing]:
    n = (x.shape[-1],)
    compiled = torch.compile(F.layer_norm)
    impls: dict[str, Callable[[], Tensor] | Missing] = {
        "onepass": lambda: layer_norm(x, w, b),
        "F.layer_norm": lambda: F.layer_norm(x, n, w, b),
        "torch.compile": lambda: compiled(x, n, w, b),
        "liger": Missing("liger-kernel"),
    }
    liger = optional("liger_kernel.ops.layer_norm")
    if liger is not None:
        impls["liger"] = lambda: liger.LigerLayerNormFunction.apply(x, w, b, 1e-5)
    return impls


def _rms_norm_rivals(x: Tensor, w: Tensor) -> dict[str, Callable[[], Tensor] | Missing]:
    n = (x.shape[-1],)
    compiled = torch.compile(F.rms_norm)
    impls: dict[str, Callable[[], Tensor] | Missing] = {
        "onepass": lambda: rms_norm(x, w),
        "F.rms_norm": lambda: F.rms_norm(x, n, w, 1e-6),
        "torch.compile": lambda: compiled(x, n, w, 1e-6),
        "liger": Missing("liger-kernel"),
        "quack": Missing("quack-kernels"),
    }
    liger, quack = optional("liger_kernel.ops.rms_norm"), optional("quack.rmsnorm")
    if liger is not None:
        # in_place would overwrite the upstream gradient that everyone here shares
        impls["liger"] = lambda: liger.LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False)
    if quack is not None:
        impls["quack"] = lambda: quack.rmsnorm(x, w, eps=1e-6)
    return impls


def _quack_layer_norm(x: Tensor, w: Tensor, b: Tensor, dy: Tensor | None) -> Impl:
    """Quack's layer norm is no autograd function and takes fp32 weights only."""
    quack = optional("quack.rmsnorm")
    if quack is None:
        return Missing("quack-kernels")

    def build() -> Callable[[], Any]:
        data, weight, bias = x.detach(), w.detach().float(), b.detach().float()
        if dy is None:
            return lambda: quack.layernorm_fwd(data, weight, bias, eps=1e-5)
        _, rstd, mean = quack.layernorm_fwd(data, weight, bias, eps=1e-5, return_rstd=True, return_mean=True)
        return lambda: quack.layernorm_bwd(data, weight, dy, rstd, mean)

    return Prepared(build)


def _case(op: str, rows: int, cols: int, dtype: torch.dtype, stage: str) -> Case:
    def make() -> Mapping[str, Impl]:
        need = stage == "backward"
        x, w, b = (torch.randn(*shape, device="cuda", dtype=dtype) for shape in ((rows, cols), (cols,), (cols,)))
        inputs = [t.requires_grad_(need) for t in ((x, w, b) if op == "layer_norm" else (x, w))]
        impls = _layer_norm_rivals(x, w, b) if op == "layer_norm" else _rms_norm_rivals(x, w)
        dy = torch.randn_like(x) if need else None
        made: dict[str, Impl] = {
            name: impl if dy is None or isinstance(impl, Missing) else backward_of(impl, inputs, dy)
            for name, impl in impls.items()
        }
        if op == "layer_norm":
            made["quack"] = _quack_layer_norm(x, w, b, dy)
        return made

    floor = rows * cols * dtype.itemsize * (2 if stage == "forward" else 3)
    check = 1e-3 if dtype == torch.float32 else 5e-2
    return Case(op, stage, {"rows": rows, "cols": cols}, dtype, floor, make, check)


def _residual_case(rows: int, cols: int, dtype: torch.dtype, stage: str) -> Case:
    """X + residual, normalised: four tensors move, forward (x, residual → s, y) and backward (dy, ds, s → ds)."""

    def make() -> Mapping[str, Impl]:
        need = stage == "backward"
        x, r, dy, ds = (torch.randn(rows, cols, device="cuda", dtype=dtype) for _ in range(4))
        w = torch.randn(cols, device="cuda", dtype=dtype)
        inputs = [t.requires_grad_(need) for t in (x, r, w)]

        def pair() -> tuple[Tensor, Tensor]:
            s = x + r
            return rms_norm(s, w), s

        compiled = torch.compile(lambda: (F.rms_norm(x + r, (cols,), w, 1e-6), x + r))
        impls: dict[str, Callable[[], Any]] = {
            "onepass": lambda: rms_norm(x, w, residual=r),
            "add, then onepass": pair,
            "torch.compile": compiled,
        }
        quack = optional("quack.rmsnorm")
        made: dict[str, Impl] = {} if quack is not None else {"quack": Missing("quack-kernels")}
        if quack is not None:
            impls["quack"] = lambda: quack.rmsnorm(x, w, residual=r, eps=1e-6, prenorm=True)

        def grads(impl: Callable[[], Any]) -> Callable[[], Callable[[], Any]]:
            def build() -> Callable[[], Any]:
                out = impl()
                return lambda: torch.autograd.grad(out, inputs, (dy, ds), retain_graph=True)

            return build

        return made | {name: Prepared(grads(f)) if need else f for name, f in impls.items()}

    check = 1e-3 if dtype == torch.float32 else 5e-2
    params = {"rows": rows, "cols": cols, "residual": True}
    return Case("rms_norm", stage, params, dtype, 4 * rows * cols * dtype.itemsize, make, check)


# the sizes of the bars: 2^25 … 2^27 elements, fewer where the rows are wide
_SIZES = (
    (262144, 128), (65536, 768), (32768, 1024), (32768, 4096), (16384, 5120), (16384, 8192), (4096, 16384),
    (4096, 32768), (1024, 65536), (1024, 131072), (512, 262144),
)  # fmt: skip
CASES = [
    _case(op, rows, cols, dtype, stage)
    for op in ("layer_norm", "rms_norm")
    for rows, cols in _SIZES
    for dtype in (torch.bfloat16, torch.float32)
    for stage in ("forward", "backward")
] + [
    _residual_case(rows, cols, dtype, stage)
    for rows, cols in ((32768, 1024), (32768, 4096), (16384, 8192))
    for dtype in (torch.bfloat16, torch.float32)
    for stage in ("forward", "backward")
]

__all__ = ["CASES", "KERNELS", "RIVALS", "SPECS"]

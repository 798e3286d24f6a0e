"""What coor_descent, soft_topk and topk promise, and what their kernels may cost."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from onepass.core.spec import BadCall, Kernel, Sample, Spec

from . import op, op_descent, op_topk, reference, spec_select
from .cases import CASES
from .op import KINDS, soft_topk
from .op_descent import coor_descent
from .op_topk import topk

__all__ = ["CASES", "KERNELS", "RIVALS", "SPECS"]

RIVALS = {"colt5_attention": "colt5-attention", "entmax": "entmax"}

_SCHEDULE = {"n_iters": 20, "eps": 0.03, "eps_init": 4.0, "eps_decay": 0.7}


def _mask(like: Tensor, *shape: int) -> Tensor:
    """A fixed mask with a few holes, a fully masked first row when there are several."""
    flat = torch.arange(math.prod(shape)) % 7 != 3
    out = flat.view(shape)
    if len(shape) > 1 and shape[0] > 1:
        out[0] = False
    return out.to(like.device)


def _soft_samples(make: Callable[..., Tensor]) -> Iterator[Sample]:
    for kind in KINDS:
        yield Sample(f"rows, {kind}", (make(4, 33), 5.3), {"kind": kind, "eps": 0.5})
        yield Sample(f"k and eps tensors, {kind}", (make(2, 3, 40), make(3).abs() + 1.3),
                     {"eps": make(2, 1).abs() + 0.4, "kind": kind})  # fmt: skip
    x = make(3, 40)
    yield Sample("mask, 0-d k", (x, make(()).abs() + 2.2), {"mask": _mask(x, 3, 40), "eps": 0.3})
    yield Sample("mask of columns", (make(2, 2, 19), 3.4), {"mask": _mask(x, 19), "kind": "sigmoid"})
    yield Sample("k at least n", (make(3, 5), 5.0), {"eps": make(3).abs() + 0.2})
    yield Sample("k above some counts", (make(3, 9), torch.tensor([2.5, 12.0, 8.6], device=x.device).to(x.dtype)), {})
    yield Sample("vector", (make(33), 4.7), {"eps": 1.0})
    yield Sample("one row", (make(1, 9), make(1).abs() + 2.2), {"eps": make(()).abs() + 0.4})
    yield Sample("one column", (make(3, 1), 0.4), {})
    yield Sample("one element", (make(1, 1), 0.4), {})
    yield Sample("wide", (make(2, 1500), 150.5), {"eps": 0.3})
    yield Sample("no columns", (make(4, 0), 2.0), {})
    yield Sample("no rows", (make(0, 4), 2.0), {})


def _descent_samples(make: Callable[..., Tensor]) -> Iterator[Sample]:
    x = make(4, 33)
    yield Sample("rows", (x,), {"n_iters": 50, "k": 5.3, "eps": 0.5})
    yield Sample("one step", (make(2, 3, 17),), {"n_iters": 1, "k": 2.5})
    yield Sample("schedule, k tensor", (make(3, 40),), {**_SCHEDULE, "k": make(3).abs() + 1.5, "eps": 0.3})
    yield Sample(
        "slow schedule", (make(3, 40),), {"n_iters": 7, "k": 4.2, "eps": 0.5, "eps_init": 4.0, "eps_decay": 0.9}
    )
    yield Sample("mask, 0-d k", (make(3, 40),), {"n_iters": 9, "k": make(()).abs() + 2.2, "mask": _mask(x, 3, 40)})
    yield Sample("k above n", (make(3, 5),), {"n_iters": 5, "k": 7.0})
    yield Sample("vector", (make(33),), {"n_iters": 12, "k": 4.5, "eps": 1.0})
    yield Sample("one row", (make(1, 9),), {"n_iters": 6, "k": make(1).abs() + 2.2, "eps": 0.5})
    yield Sample("one column", (make(3, 1),), {"n_iters": 4, "k": 0.5})
    yield Sample("one element", (make(1, 1),), {"n_iters": 4, "k": 0.5})
    yield Sample("wide", (make(2, 1500),), {"n_iters": 10, "k": 100.5, "eps": 0.5})
    yield Sample("no columns", (make(4, 0),), {"n_iters": 3, "k": 2.0})
    yield Sample("no rows", (make(0, 4),), {"n_iters": 3, "k": 2.0})


def _topk_samples(make: Callable[..., Tensor]) -> Iterator[Sample]:
    x = make(3, 20)
    yield Sample("rows", (x, 4), {"eps": 0.5})
    yield Sample("eps tensor, mask", (make(2, 3, 9), 4), {"eps": make(3).abs() + 0.4, "mask": _mask(x, 3, 9)})
    yield Sample("sigmoid", (make(4, 9), 3), {"kind": "sigmoid", "eps": 0.5})
    yield Sample("k above n", (make(2, 3), 5), {})
    yield Sample("vector", (make(33), 4), {"eps": 1.0})
    yield Sample("one row", (make(1, 9), 3), {"eps": make(()).abs() + 0.4})
    yield Sample("one column", (make(3, 1), 1), {})
    yield Sample("wide", (make(2, 1500), 150), {"eps": 0.3})
    yield Sample("no rows", (make(0, 4), 2), {})


def _tensors(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def _soft_opchecks() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    s = _tensors(2, 3, 10).requires_grad_()
    k, eps = torch.tensor([[2.5], [3.5]], requires_grad=True), torch.tensor(0.5, requires_grad=True)
    allowed = _mask(s, 10)
    state = op.forward_op(s.detach(), k.detach(), eps.detach(), allowed, 0.0, 0.0, 0)[1]
    yield op.forward_op, (s, k, eps, allowed, 0.0, 0.0, 0)
    yield op.forward_op, (s, None, None, None, 2.5, 0.5, 1)
    for needs in ((True, True, True), (False, True, False), (False, False, True)):
        gradient = _tensors(2, 3, 10)
        yield op.backward_op, (gradient, s.detach(), state, k.detach(), eps.detach(), allowed, 0.0, 0, *needs)


def _descent_opchecks() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    s, k = _tensors(2, 3, 10).requires_grad_(), torch.tensor([[2.5], [3.5]], requires_grad=True)
    allowed = _mask(s, 10)
    options = (0.0, 5, 0.3, 2.0, 0.7)
    trace = op_descent.forward_op(s.detach(), k.detach(), allowed, *options, True)[1]
    yield op_descent.forward_op, (s, k, allowed, *options, True)
    yield op_descent.forward_op, (s.detach(), None, None, 2.5, *options[1:], False)
    for needs in ((True, True), (False, True)):
        yield op_descent.backward_op, (_tensors(2, 3, 10), s.detach(), trace, k.detach(), allowed, *options, *needs)


def _topk_opchecks() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    s, eps = _tensors(2, 3, 10).requires_grad_(), torch.tensor(0.5, requires_grad=True)
    allowed = _mask(s, 10)
    yield op_topk.select_op, (s.detach(), allowed, 4)
    yield op_topk.forward_op, (s, eps, allowed, 4, 0.0, 0, True)
    yield op_topk.forward_op, (s, None, None, 12, 0.5, 1, False)
    values, indices, _, state = op_topk.forward_op(s.detach(), eps.detach(), allowed, 4, 0.0, 0, True)
    saved = s.detach(), indices, state, eps.detach(), allowed, 0.0, 0
    gradient = torch.ones_like(values)
    yield op_topk.backward_op, (gradient, gradient, *saved, True, True)
    yield op_topk.backward_op, (None, gradient, *saved, False, True)


_S = torch.zeros(2, 3)
_TWO = torch.tensor([1.0, 2.0])
_EPS: Any = _TWO


def _arguments_refused(name: str, call: Callable[..., Any]) -> Iterator[BadCall]:
    """What every operator here refuses: `call(scores, k, mask)`."""
    ones = torch.ones(2, 3)
    yield BadCall(f"{name} list", lambda: call([1.0], 1, None), TypeError, f"{name}: scores must be a tensor, got list")
    yield BadCall(f"{name} 0-d", lambda: call(torch.ones(()), 1, None), ValueError, "0-d")
    yield BadCall(f"{name} integers", lambda: call(ones.long(), 1, None), TypeError, "scores must be .*int64")
    yield BadCall(f"{name} k string", lambda: call(ones, "2", None), TypeError, "k must be .*str")
    yield BadCall(f"{name} k negative", lambda: call(ones, -1, None), ValueError, "k must be .*-1")
    yield BadCall(f"{name} mask dtype", lambda: call(ones, 1, ones), TypeError, "mask must be a bool tensor.*float32")
    yield BadCall(
        f"{name} mask shape", lambda: call(ones, 1, torch.ones(3, 3, dtype=torch.bool)), ValueError,
        r"mask must broadcast to the scores' shape \(2, 3\), got \(3, 3\)",
    )  # fmt: skip


_BAD_SOFT = (
    *_arguments_refused("soft_topk", lambda s, k, mask: soft_topk(s, k, mask=mask)),
    BadCall("k zero", lambda: soft_topk(_S, 0), ValueError, "k must be > 0, got 0"),
    BadCall("k nan", lambda: soft_topk(_S, math.nan), ValueError, "k must be > 0, got nan"),
    BadCall("k tensor", lambda: soft_topk(_S, _TWO - 1), ValueError, "k must be > 0 everywhere, got a minimum of 0"),
    BadCall(
        "k shape", lambda: soft_topk(_S, torch.ones(3)), ValueError, r"k must be a number or broadcast.*\(2,\).*\(3,\)"
    ),
    BadCall("k bool", lambda: soft_topk(_S, torch.ones(2) > 0), TypeError, "k must be a number or a real tensor"),
    BadCall("eps zero", lambda: soft_topk(_S, 1, eps=0.0), ValueError, "eps must be > 0, got 0.0"),
    BadCall("eps tensor", lambda: soft_topk(_S, 1, eps=-_TWO), ValueError, "eps must be > 0 everywhere"),
    BadCall("kind", lambda: soft_topk(_S, 1, kind="soft"), ValueError, "kind must be one of capped_exp, .*'soft'"),
)
_BAD_DESCENT = (
    *_arguments_refused("coor_descent", lambda s, k, mask: coor_descent(s, n_iters=3, k=k, mask=mask)),
    BadCall("no steps", lambda: coor_descent(_S, n_iters=0, k=1), ValueError, "n_iters must be ≥ 1, got 0"),
    BadCall("half a step", lambda: coor_descent(_S, n_iters=1.5, k=1), TypeError, "n_iters must be an int, got float"),  # type: ignore[arg-type]
    BadCall("k zero", lambda: coor_descent(_S, n_iters=1, k=0), ValueError, "k must be > 0, got 0"),
    BadCall("eps", lambda: coor_descent(_S, n_iters=1, k=1, eps=0.0), ValueError, "eps must be > 0"),
    BadCall(
        "eps tensor", lambda: coor_descent(_S, n_iters=1, k=1, eps=_EPS), TypeError, "eps must be a number.*Tensor"
    ),
    BadCall("eps inf", lambda: coor_descent(_S, n_iters=1, k=1, eps=math.inf), ValueError, r"eps must be ≤ 3.4e\+38"),
    BadCall("eps_decay", lambda: coor_descent(_S, n_iters=1, k=1, eps_decay=0), ValueError, "eps_decay must be > 0"),
)

_BAD_TOPK = (
    BadCall("list", lambda: topk([1.0], 1), TypeError, "topk: scores must be a tensor, got list"),  # type: ignore[arg-type]
    BadCall("k negative", lambda: topk(_S, -1), ValueError, "topk: k must be ≥ 0, got -1"),
    BadCall("k real", lambda: topk(_S, 1.5), TypeError, "topk: k must be an int, got float"),  # type: ignore[arg-type]
    BadCall("eps", lambda: topk(_S, 1, eps=0.0), ValueError, "topk: eps must be > 0, got 0.0"),
    BadCall("kind", lambda: topk(_S, 1, kind="hard"), ValueError, "topk: kind must be one of .*'hard'"),
    BadCall("mask", lambda: topk(_S, 1, mask=torch.ones(2, 2).bool()), ValueError, "topk: mask must broadcast"),
)


def _soft_rows(make: Callable[..., Tensor], n: int) -> Mapping[str, Callable[[Tensor], Any]]:
    k = max(1, n // 7)
    calls: dict[str, Callable[[Tensor], Any]] = {
        f"soft_topk, {kind}": functools.partial(soft_topk, k=k, eps=0.3, kind=kind) for kind in KINDS
    }
    return calls | {
        "soft_topk, small eps": lambda x: soft_topk(x, k, eps=0.01),
        "soft_topk, mask": lambda x: soft_topk(x, k, eps=0.3, mask=x.abs() < 2),
        "topk": lambda x: topk(x, k, eps=0.3),
    }


def _descent_rows(make: Callable[..., Tensor], n: int) -> Mapping[str, Callable[[Tensor], Any]]:
    k, schedule = max(1, n // 7), dict[str, Any](_SCHEDULE)
    return {
        "coor_descent": lambda x: coor_descent(x, n_iters=20, k=k, eps=0.1),
        "coor_descent, schedule": functools.partial(coor_descent, k=k, **schedule),
    }


SPECS = [
    Spec(
        name="soft_topk", op=soft_topk, reference=reference.soft_topk, samples=_soft_samples, bad_calls=_BAD_SOFT,
        opchecks=_soft_opchecks, of_rows=_soft_rows,
    ),
    Spec(
        name="coor_descent", op=coor_descent, reference=reference.coor_descent, samples=_descent_samples,
        bad_calls=_BAD_DESCENT, opchecks=_descent_opchecks, of_rows=_descent_rows,
    ),
    # gates are 1, with the gradient of soft ones
    Spec(
        name="topk", op=topk, reference=reference.topk, samples=_topk_samples, bad_calls=_BAD_TOPK,
        opchecks=_topk_opchecks, surrogate=True,
    ),
]  # fmt: skip


def _kernel(module: str, name: str) -> Callable[[], Any]:
    def load() -> Any:
        import importlib

        return getattr(importlib.import_module(f"onepass.ops.soft_topk.{module}"), name)

    return load


_SIZES = ("s_row_stride", "gy_row_stride", "k_stride", "eps_stride", "mask_row_stride", "n_rows", "n_cols", "n_splits",
          "chunk", "tiles", "turn", "t", "n_iters", "n_changing")  # fmt: skip
_NUMBERS = ("k_value", "eps_value", "eps_first", "eps_last", "log2_decay", "eps_before", "eps")
_DIVISIBLE = ("s_ptr", "y_ptr", "gy_ptr", "ds_ptr", "mask_ptr", "s_row_stride", "gy_row_stride", "mask_row_stride",
              "n_cols", "chunk")  # fmt: skip


def _signature(names: str, dtype: str) -> dict[str, str]:
    types = dict.fromkeys(_SIZES, "i32") | dict.fromkeys(_NUMBERS, "fp32") | {"mask_ptr": "*u8", "words_ptr": "*i64"}
    types |= dict.fromkeys(("s_ptr", "y_ptr", "gy_ptr", "ds_ptr"), f"*{dtype}")
    return {n: types.get(n, "*fp32") for n in names.split()}


_FORWARD = ("s_ptr k_ptr eps_ptr mask_ptr y_ptr solution_ptr s_row_stride k_stride eps_stride mask_row_stride n_rows "
            "n_cols k_value eps_value")  # fmt: skip
_PASS = ("s_ptr k_ptr eps_ptr mask_ptr y_ptr solution_ptr ends_ptr state_ptr partial_ptr s_row_stride k_stride "
         "eps_stride mask_row_stride n_rows n_cols chunk k_value eps_value turn")  # fmt: skip
_BACKWARD = ("gy_ptr s_ptr eps_ptr mask_ptr solution_ptr partial_ptr ds_ptr dk_ptr deps_ptr gy_row_stride s_row_stride "
             "eps_stride mask_row_stride n_rows n_cols n_splits tiles eps_value")  # fmt: skip
_DESCENT = ("s_ptr k_ptr mask_ptr y_ptr trace_ptr s_row_stride k_stride mask_row_stride n_rows n_cols k_value n_iters "
            "n_changing eps_first eps_last log2_decay")  # fmt: skip
_DESCENT_STEP = ("s_ptr k_ptr mask_ptr y_ptr trace_ptr state_ptr partial_ptr s_row_stride k_stride mask_row_stride "
                 "n_rows n_cols chunk k_value t n_iters eps_before eps")  # fmt: skip
_DESCENT_BACKWARD = ("gy_ptr s_ptr k_ptr mask_ptr trace_ptr partial_ptr ds_ptr dk_ptr gy_row_stride s_row_stride "
                     "k_stride mask_row_stride n_rows n_cols n_splits k_value n_iters n_changing eps_first eps_last "
                     "log2_decay")  # fmt: skip


_FORWARD_SHAPES = (
    ("fp32", 0, 64), ("fp32", 0, 1024), ("fp32", 0, 8192), ("fp32", 0, 16384), ("fp32", 0, 32768), ("bf16", 0, 8192),
    ("fp32", 1, 8192), ("fp32", 2, 8192), ("fp32", 3, 8192), ("fp32", 1, 16384),
)  # fmt: skip
# bytes of local memory under the launch's register limit: more rows under way gain more than the bracketed search
# (which few rows take) loses by waiting there
_CROWDED = {
    (0, 1024): 168, (0, 8192): 336, (0, 16384): 304, (0, 32768): 704, (1, 8192): 304, (2, 8192): 192, (3, 8192): 496,
    (1, 16384): 304,
}  # fmt: skip
_DESCENT_CROWDED = {8192: 128, 32768: 128}


def _kernels() -> Iterator[Kernel]:
    if _triton_missing():
        return
    from . import kernels_backward, kernels_common, kernels_descent, kernels_descent_backward, kernels_triton

    plain = {"HAS_K": False, "HAS_EPS": False, "HAS_MASK": False}
    for dtype, kind, cols in _FORWARD_SHAPES:
        plan = kernels_triton.forward_shape(1 << 16, cols, kind)
        yield Kernel(
            f"soft_topk forward {KINDS[kind]} {dtype} {plan.block_r}x{cols}",
            _kernel("kernels_triton", "forward_kernel"), _signature(_FORWARD, dtype),
            {**plain, "KIND": kind, "BLOCK_R": plan.block_r, "BLOCK_C": cols, "VEC": 16}, _DIVISIBLE,
            **kernels_triton.forward_options(plan, kind), max_registers=176,
            max_spill_bytes=_CROWDED.get((kind, cols), 0),
        )  # fmt: skip
    for dtype, cols in (("fp32", 64), ("fp32", 1024), ("fp32", 8192), ("fp32", 32768), ("bf16", 8192)):
        plan = kernels_descent.forward_shape(1 << 16, cols)
        yield Kernel(
            f"coor_descent forward {dtype} {plan.block_r}x{cols}",
            _kernel("kernels_descent", "forward_kernel"), _signature(_DESCENT, dtype),
            {"HAS_K": False, "HAS_MASK": False, "TRACE": True, "BLOCK_R": plan.block_r, "BLOCK_C": cols, "VEC": 16},
            _DIVISIBLE, **kernels_descent.forward_options(plan), max_registers=160,
            max_spill_bytes=_DESCENT_CROWDED.get(cols, 0),
        )  # fmt: skip
        if cols > kernels_backward.LONGEST:
            continue
        plan = kernels_common.shape(1 << 16, cols, kernels_common.HALF_PER_WARP, kernels_backward.LONGEST)
        yield Kernel(
            f"soft_topk backward {dtype} {plan.block_r}x{cols}",
            _kernel("kernels_backward", "backward_kernel"), _signature(_BACKWARD, dtype),
            {"KIND": 0, "HAS_EPS": False, "HAS_MASK": False, "NEED_S": True, "NEED_EPS": False, "SUMS_ONLY": False,
             "N_SPLITS": 0, "BLOCK_R": plan.block_r, "BLOCK_C": cols, "VEC": 16},
            _DIVISIBLE, num_warps=plan.warps, max_registers=80,
        )  # fmt: skip
        plan = kernels_common.shape(1 << 16, cols, kernels_common.HALF_PER_WARP, kernels_descent_backward.LONGEST)
        yield Kernel(
            f"coor_descent backward {dtype} {plan.block_r}x{cols}",
            _kernel("kernels_descent_backward", "backward_kernel"), _signature(_DESCENT_BACKWARD, dtype),
            {"HAS_K": False, "HAS_MASK": False, "N_SPLITS": 0, "BLOCK_R": plan.block_r, "BLOCK_C": cols, "VEC": 16},
            _DIVISIBLE, num_warps=plan.warps, max_registers=128,
        )  # fmt: skip
    plan = kernels_triton.forward_shape(2, 1 << 20, 0)
    long = {"FIRST": False, "LAST": False, "N_SPLITS": plan.splits, "BLOCK_C": plan.block_c}
    yield Kernel(
        "soft_topk pass over long rows", _kernel("kernels_triton", "pass_kernel"), _signature(_PASS, "fp32"),
        {**plain, **long, "KIND": 0}, _DIVISIBLE, num_warps=plan.warps, max_registers=128,
    )  # fmt: skip
    block, warps, per_sm = kernels_triton.TEAM
    team = {"TEAM": 64, "WIDTH": 256, "BLOCK_C": block}
    for kind in (0, 1):
        yield Kernel(
            f"soft_topk team {KINDS[kind]}", _kernel("kernels_triton", "team_kernel"),
            _signature(_FORWARD.replace("solution_ptr", "solution_ptr words_ptr"), "fp32"),
            {**plain, **team, "KIND": kind, "VEC": 16}, _DIVISIBLE,
            **kernels_common.resident(warps, per_sm), max_registers=128, max_spill_bytes=256 if kind else 16, amd=False,
        )  # fmt: skip
    block, warps, per_sm = kernels_descent.TEAM
    yield Kernel(
        "coor_descent team", _kernel("kernels_descent", "team_kernel"),
        _signature(_DESCENT.replace("trace_ptr", "trace_ptr words_ptr"), "fp32"),
        {"HAS_K": False, "HAS_MASK": False, "TRACE": True, **team, "BLOCK_C": block, "VEC": 16}, _DIVISIBLE,
        # 96 under Triton 3.9, 104 under 3.6: faster all the same than the exchange that spilled nothing
        **kernels_common.resident(warps, per_sm), max_registers=128, max_spill_bytes=104, amd=False,
    )  # fmt: skip
    yield Kernel(
        "coor_descent step over long rows", _kernel("kernels_descent", "step_kernel"),
        _signature(_DESCENT_STEP, "fp32"), {"HAS_K": False, "HAS_MASK": False, "TRACE": True, **long}, _DIVISIBLE,
        num_warps=plan.warps, max_registers=128,
    )  # fmt: skip


def _triton_missing() -> bool:
    from onepass.core.launch import triton_installed

    return not triton_installed()


KERNELS = [*_kernels(), *spec_select.KERNELS]

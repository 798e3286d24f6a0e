"""The exchange between the programs of a team, without a GPU: one process per program, in the Triton interpreter.

The interpreter runs a grid one program after another, where teams would wait for ever. Here every program has a
process of its own and all share the memory, so that they wait for each other as they do on a GPU.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.core.launch import cdiv, next_power_of_2
from onepass.ops.norm import definition

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.skipif(sys.version_info >= (3, 14), reason="fork of a process with threads warns"),
]


@triton.jit
def await_words(ptr, parity, TEAM: tl.constexpr, WIDTH: tl.constexpr):
    """What the assembly does, in the language that the interpreter knows."""
    ptrs = ptr + tl.minimum(tl.arange(0, WIDTH), TEAM - 1)
    words = tl.load(ptrs, volatile=True)
    while tl.min(((words & 1) == parity).to(tl.int32), 0) == 0:
        words = tl.load(ptrs, volatile=True)
    return words


def _program(kernel: Any, index: int, programs: int, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    from triton.runtime import interpreter

    from onepass.ops.norm import kernels_team

    kernels_team.await_words = await_words
    builder = interpreter.interpreter_builder
    set_index, set_grid = builder.set_grid_idx, builder.set_grid_dim
    builder.set_grid_idx = lambda *_: set_index(index, 0, 0)
    builder.set_grid_dim = lambda *_: set_grid(programs, 1, 1)
    interpreter.GridExecutor(kernel.fn, kernel.arg_names, (1, 1, 1))(*args, **constants)


def _run(kernel: Any, programs: int, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    children = []
    for index in range(programs):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                _program(kernel, index, programs, args, constants)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)


def _shared(t: Tensor) -> Tensor:
    return t.contiguous().share_memory_()


@pytest.mark.parametrize(
    ("rows", "lag", "has_mean", "residual"),
    [(1, 0, True, False), (1, 1, True, True), (2, 0, False, False), (2, 1, True, True)],
)
def test_programs_agree(rows: int, lag: int, has_mean: bool, residual: bool) -> None:
    from onepass.ops.norm.kernels_team import team_backward_kernel

    n_rows, n_cols, block, teams = 11, 40, 16, 1
    size = cdiv(n_cols, block)
    x, r, dy, ds = (_shared((2 * torch.randn(n_rows, n_cols) + 1).round()) for _ in range(4))
    x[1], x[2] = -x[1].abs() - 1, 0
    w, b = _shared(torch.randn(n_cols)), _shared(torch.randn(n_cols))
    eps, offset = 0.1, 0.0 if has_mean else 1.0
    dx, partials = _shared(torch.zeros(n_rows, n_cols)), _shared(torch.zeros(1 + has_mean, teams, n_cols))
    shape = {
        "N_COLS": n_cols, "VEC": 1, "HAS_MEAN": has_mean, "BLOCK_C": block, "TEAM": size,
        "WIDTH": next_power_of_2(size), "R": rows, "LAG": lag, "STAGES": 1, "COOPERATIVE": False,
    }  # fmt: skip
    words = _shared(torch.zeros(4 * teams * rows * size + 1, dtype=torch.int64))
    total = x + r if residual else x
    var, mean = torch.var_mean(total, -1, correction=0) if has_mean else (total.square().mean(-1), torch.zeros(n_rows))
    stats = _shared(torch.stack(((var + eps).rsqrt(), mean))[: 1 + has_mean])
    given = (dy, ds if residual else None, _shared(total), w, stats, dx, partials, words)
    numbers = (n_cols, n_cols, n_cols, n_rows, offset)
    needs = {"NEED_W": True, "NEED_B": has_mean}
    _run(team_backward_kernel, teams * size, (*given, *numbers), shape | needs)

    leaf, weight = total.double().requires_grad_(), w.double().requires_grad_()
    if has_mean:
        want = definition.layer_norm(leaf, weight, b.double(), eps=eps)
    else:
        want = definition.rms_norm(leaf, weight, eps=eps, offset=offset)
    grad, grad_w = torch.autograd.grad(want, (leaf, weight), dy.double())
    torch.testing.assert_close(dx.double(), grad + ds if residual else grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(partials[0].double().sum(0), grad_w, rtol=1e-5, atol=1e-4)
    if has_mean:
        torch.testing.assert_close(partials[1].double().sum(0), dy.double().sum(0), rtol=1e-5, atol=1e-4)

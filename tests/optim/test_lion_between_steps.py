"""What a step keeps for the next one; that the next one sees every change is in `tests/ops/lion/test_machine.py`.

The tests of tables take CPU tensors for a GPU's, and the launch notes what it would read instead of running.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from onepass.optim import Lion
from onepass.optim.options import cautious_factor

Tables = list[tuple[list[int], int, int]]


def new(n: int = 64) -> Any:
    p = torch.nn.Parameter(torch.randn(n))
    p.grad = torch.randn(n)
    return p


def test_bools_of_numpy_are_bools() -> None:
    values = False, 1.0, 1, np.False_, True, 0.0, np.True_
    assert [cautious_factor({"cautious": value}) for value in values] == [None, None, None, None, 0.0, 0.0, 0.0]


def test_an_array_as_rate_meets_tensors_of_any_device() -> None:
    p = torch.zeros(4, device="meta", requires_grad=True)
    p.grad = torch.zeros_like(p)
    Lion([p], lr=np.array(0.125)).step()  # type: ignore[arg-type]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Tables:
    """(words, tensors, groups) of every launch."""
    pytest.importorskip("triton")
    from onepass.ops.lion import kernels
    from onepass.optim import step as steps

    seen: Tables = []

    def launch(of: Any, table: Tensor, n_groups: int, *_: Any) -> None:
        seen.append((table.tolist(), len(of.sizes), n_groups))

    monkeypatch.setattr(kernels, "launch", launch)
    monkeypatch.setattr(steps, "uses_triton", lambda x: True)
    return seen


def test_what_a_matrix_left_in_another_shape_is_refused(tables: Tables) -> None:
    """The start of a matrix has its address and strides; what its gradient has beyond isn't the launch's to touch."""
    matrix = torch.nn.Parameter(torch.randn(6, 6))
    optimizer = Lion([new(), matrix], lr=0.125)
    for changes_gradient in (True, False):
        matrix.grad = torch.randn(6, 6)
        optimizer.step()
        optimizer.step()
        kept = len(tables)
        changed = matrix.grad if changes_gradient else matrix
        changed.data = changed.data[:3]
        with pytest.raises(ValueError, match=r"shape \((3|6), 6\), its gradient \((6|3), 6\) and its exp_avg \(6, 6\)"):
            optimizer.step()
        assert len(tables) == kept


def test_another_dtype_at_the_same_address_is_another_launch(tables: Tables) -> None:
    matrix = torch.nn.Parameter(torch.randn(6, 6).bfloat16())
    matrix.grad = torch.randn(6, 6).bfloat16()
    optimizer = Lion([matrix], lr=0.125)
    optimizer.step()
    optimizer.step()
    launched = len(tables)
    matrix.data = matrix.data.view(torch.float16)
    optimizer.step()
    assert len(tables) == launched + 1


def test_what_a_graph_copies_from_stays_when_the_launch_goes(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    from onepass.ops.lion import table

    optimizer = Lion([new(), new()])
    optimizer.step()
    sources: list[Any] = []
    send = table.Launch._send

    def noted(*args: Any) -> Tensor:
        source = send(*args)
        sources.append(weakref.ref(source.untyped_storage()))
        return source

    monkeypatch.setattr(table.Launch, "_send", noted)
    monkeypatch.setattr(table, "_replayed", [])
    monkeypatch.setattr(table, "_capturing", lambda device: True)
    optimizer.step()
    monkeypatch.setattr(table, "_capturing", lambda device: False)
    optimizer.param_groups[0]["params"][0].grad = None
    optimizer.step()
    gc.collect()
    assert [source() is not None for source in sources] == [True, False]


def test_a_default_device_is_not_the_tables(tables: Tables) -> None:
    optimizer = Lion([new(), new()])
    with torch.device("meta"):
        optimizer.step()
    assert len(tables) == 1


def test_an_unchanged_step_lays_out_no_numbers(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    from onepass.optim import step as steps

    optimizer = Lion([{"params": [new()]} for _ in range(5)], lr=1e-3)
    optimizer.step()
    pack_rows, calls = steps.pack_rows, []
    monkeypatch.setattr(steps, "pack_rows", lambda rows: calls.append(None) or pack_rows(rows))
    optimizer.step()
    assert not calls
    optimizer.param_groups[4]["lr"] = 1e-2
    optimizer.step()
    assert len(calls) == 1

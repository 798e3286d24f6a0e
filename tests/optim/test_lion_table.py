"""What a launch reads at each step: the addresses and hyperparameters of that moment, whatever changed since the last.

The optimizer takes CPU tensors for a GPU's here, and the launch notes its table instead of running.
"""

from __future__ import annotations

import gc
import struct
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.optim import Lion

pytest.importorskip("triton")

Tables = list[tuple[list[int], int, int]]
SIZES = (1, 300, 64, 48)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Tables:
    """(words, tensors, groups) of every launch."""
    from onepass.ops.lion import kernels_triton
    from onepass.optim import step as steps

    seen: Tables = []

    def launch(table: Tensor, n_chunks: int, n_tensors: int, n_groups: int, *_: Any) -> None:
        seen.append((table.tolist(), n_tensors, n_groups))

    monkeypatch.setattr(kernels_triton, "launch", launch)
    monkeypatch.setattr(steps, "uses_triton", lambda x: True)
    return seen


def new(n: int = 64) -> Tensor:
    p = torch.nn.Parameter(torch.randn(n))
    p.grad = torch.randn(n)
    return p


def expected(optimizer: Lion) -> tuple[list[int], list[float]]:
    """Addresses column by column, and each group's numbers as fp32."""
    live = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    addresses = [p.grad.data_ptr() for p in live if p.grad is not None]
    addresses += [p.data_ptr() for p in live] + [optimizer.state[p]["exp_avg"].data_ptr() for p in live]
    numbers: list[float] = []
    for group in optimizer.param_groups:
        (beta1, beta2), peak = group["betas"], group.get("peak_lr", 1.0)
        decay = float(group["weight_decay"]) / (peak if group["decouple_lr"] else 1.0)
        sign = -1.0 if group["maximize"] else 1.0
        numbers += [float(group["lr"]), decay, beta1, 1 - beta1, beta2, 1 - beta2, sign, 0.0, 1.0, 0.0]
    return addresses, list(struct.unpack(f"{len(numbers)}f", struct.pack(f"{len(numbers)}f", *numbers)))


def read(tables: Tables) -> tuple[list[int], list[float]]:
    words, n_tensors, n_groups = tables[-1]
    numbers = struct.unpack(f"{10 * n_groups}f", struct.pack(f"{5 * n_groups}q", *words[: 5 * n_groups]))
    return words[5 * n_groups : 5 * n_groups + 3 * n_tensors], list(numbers)


def params_of(optimizer: Lion) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def nothing(optimizer: Lion) -> None:
    pass


def gradients_in_place(optimizer: Lion) -> None:
    optimizer.zero_grad(set_to_none=False)


def new_gradients(optimizer: Lion) -> None:
    # both exist at a time, so that their addresses differ
    made = [torch.randn_like(p) for p in params_of(optimizer)]
    for p, g in zip(params_of(optimizer), made, strict=True):
        p.grad = g


def gradient_data(optimizer: Lion) -> None:
    grad = params_of(optimizer)[1].grad
    assert grad is not None
    grad.data = grad.data.clone()


def parameter_data(optimizer: Lion) -> None:
    p = params_of(optimizer)[2]
    p.data = p.data.clone()


def state_data(optimizer: Lion) -> None:
    # as those do who keep states on the CPU between steps
    for state in optimizer.state.values():
        state["exp_avg"].data = state["exp_avg"].data.clone()


def loaded_state(optimizer: Lion) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def one_state(optimizer: Lion) -> None:
    p = params_of(optimizer)[0]
    optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].clone()


def another_group(optimizer: Lion) -> None:
    optimizer.add_param_group({"params": [new(), new(7)], "lr": 0.5})


def gone_gradient(optimizer: Lion) -> None:
    params_of(optimizer)[3].grad = None


def set_in_first(key: str, value: Any) -> Callable[[Lion], None]:
    def change(optimizer: Lion) -> None:
        optimizer.param_groups[0][key] = value

    change.__name__ = f"new_{key}"
    return change


def written_betas(optimizer: Lion) -> None:
    optimizer.param_groups[1]["betas"][0] = 0.5


def written_rate(optimizer: Lion) -> None:
    optimizer.param_groups[2]["lr"].fill_(0.75)


def new_peak(optimizer: Lion) -> None:
    optimizer.param_groups[3]["peak_lr"] = 0.25


CHANGES: list[Callable[[Lion], None]] = [
    nothing, gradients_in_place, new_gradients, gradient_data, parameter_data, state_data, loaded_state, one_state,
    another_group, gone_gradient, set_in_first("lr", 0.125), set_in_first("weight_decay", 0.5),
    set_in_first("betas", (0.5, 0.75)), set_in_first("maximize", True), set_in_first("lr", torch.tensor(0.0625)),
    written_betas, written_rate, new_peak,
]  # fmt: skip


@pytest.mark.parametrize("plain", [True, False], ids=["numbers", "tensors and lists"])
def test_every_launch_reads_what_is_there(tables: Tables, plain: bool) -> None:
    """One optimizer lives through all changes, with plain numbers and with some that can be written to."""
    groups: list[dict[str, Any]] = [{"params": [new(n) for n in SIZES]}]
    if not plain:
        groups += [
            {"params": [new()], "betas": [0.9, 0.99]}, {"params": [new()], "lr": torch.tensor(0.5)},
            {"params": [new()], "decouple_lr": True},
        ]  # fmt: skip
    optimizer = Lion(groups, lr=1e-3, weight_decay=0.1)
    optimizer.step()
    for change in CHANGES:
        if plain and change in (written_betas, written_rate, new_peak):
            continue
        optimizer.step()
        change(optimizer)
        optimizer.step()
        assert read(tables) == expected(optimizer), change.__name__
    assert len(tables) >= 2 * (len(CHANGES) - 3)


def turned_elsewhere(p: Tensor) -> None:
    p.data = p.data.t().contiguous().t()


def turned_in_place(p: Tensor) -> None:
    p.data = p.data.t()


def turned_gradient_in_place(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.data = p.grad.data.t()


@pytest.mark.parametrize("change", [turned_elsewhere, turned_in_place, turned_gradient_in_place])
def test_a_matrix_that_was_turned_leaves_the_launch(tables: Tables, change: Callable[[Tensor], None]) -> None:
    """Its elements lie in another order than its gradient's: as vectors they would meet the wrong ones."""
    matrix = torch.nn.Parameter(torch.randn(6, 6))
    matrix.grad = torch.randn(6, 6)
    optimizer = Lion([new(), matrix, new()], lr=0.125, weight_decay=0.5)
    optimizer.step()
    optimizer.step()
    assert read(tables) == expected(optimizer)
    change(matrix)
    before, m = matrix.detach().clone(), optimizer.state[matrix]["exp_avg"].clone()
    optimizer.step()
    launched, _ = read(tables)
    assert tables[-1][1] == 2
    assert matrix.data_ptr() not in launched
    u = 0.9 * m + 0.1 * matrix.grad
    torch.testing.assert_close(matrix.detach(), before - 0.125 * (u.sign() + 0.5 * before))


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


@pytest.mark.parametrize(("key", "value", "words"), [
    ("betas", (torch.tensor(0.5), 0.99), r"Invalid betas: \(tensor\(0.5000\), 0.99\); Lion takes two numbers"),
    ("betas", (torch.tensor(0.9, dtype=torch.float64), 0.99), "Lion takes two numbers"),
    ("betas", (0.5,), r"Invalid betas: \(0.5,\); Lion takes two numbers"),
    ("cautious", torch.tensor(0.5), "Invalid cautious value"),
])  # fmt: skip
@pytest.mark.parametrize("launched", [True, False])
def test_tensors_that_a_launch_would_not_read_again_are_refused(
    request: pytest.FixtureRequest, launched: bool, key: str, value: Any, words: str
) -> None:
    """By a step in the constructor's words, also when their values are the old ones."""
    if launched:
        request.getfixturevalue("tables")
    p = new()
    with pytest.raises(ValueError, match=words):
        Lion([p], **{key: value})
    optimizer = Lion([p])
    optimizer.step()
    optimizer.param_groups[0][key] = value
    before = p.detach().clone()
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    assert torch.equal(p, before)


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
    torch.set_default_device("meta")
    try:
        optimizer.step()
    finally:
        torch.set_default_device(None)
    assert read(tables) == expected(optimizer)


def test_a_rate_in_an_array_is_read_at_each_step(tables: Tables) -> None:
    numpy = pytest.importorskip("numpy")
    rate = numpy.array(0.5)
    optimizer = Lion([new()], lr=rate)
    for value in (0.5, 0.25):
        rate[...] = value
        optimizer.step()
        assert read(tables)[1][0] == value


def test_an_unchanged_step_lays_out_no_numbers(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    from onepass.optim import step as steps

    optimizer = Lion([{"params": [new()]} for _ in range(5)], lr=1e-3)
    optimizer.step()
    rows_of, calls = steps.rows_of, []
    monkeypatch.setattr(steps, "rows_of", lambda groups: calls.append(None) or rows_of(groups))
    optimizer.step()
    assert not calls
    optimizer.param_groups[4]["lr"] = 1e-2
    optimizer.step()
    assert len(calls) == 1

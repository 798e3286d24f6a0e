"""What may change between two steps is seen by the next one: memory, objects, gradients, groups.

The tests of tables take CPU tensors for a GPU's, and the launch notes what it would read instead of running.
"""

from __future__ import annotations

import gc
import struct
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from onepass.optim import Lion

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(1,), (300,), (), (8, 6), (5, 5)]

Tables = list[tuple[list[int], int, int]]
Change = Callable[[Lion, list[Any]], Any]


def new(n: int = 64) -> Any:
    p = torch.nn.Parameter(torch.randn(n))
    p.grad = torch.randn(n)
    return p


def params_of(optimizer: Lion) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def replace(owner: Any, name: str, value: Tensor) -> None:
    """Set an attribute, or an entry of a dict, to a tensor in other memory."""
    owner.__setitem__(name, value) if isinstance(owner, dict) else setattr(owner, name, value)


# changes after which the same tensors are updated in one launch
SEEN: dict[str, Change] = {
    "nothing": lambda o, ps: None,
    "moved parameters": lambda o, ps: [replace(p, "data", p.data.clone()) for p in ps],
    "a moved parameter": lambda o, ps: replace(ps[2], "data", ps[2].data.clone()),
    "gradients in place": lambda o, ps: o.zero_grad(set_to_none=False),
    "moved gradients": lambda o, ps: [replace(p, "grad", p.grad.clone()) for p in ps],
    "moved memory of a gradient": lambda o, ps: replace(ps[1].grad, "data", ps[1].grad.data.clone()),
    # as those do who keep states on the CPU between steps
    "moved memory of states": lambda o, ps: [
        replace(s["exp_avg"], "data", s["exp_avg"].clone()) for s in o.state.values()
    ],
    "replaced states": lambda o, ps: [replace(s, "exp_avg", s["exp_avg"].clone()) for s in o.state.values()],
    "a negated state": lambda o, ps: replace(o.state[ps[0]], "exp_avg", -o.state[ps[0]]["exp_avg"]),
    "a loaded state": lambda o, ps: o.load_state_dict(o.state_dict()),
    "another group": lambda o, ps: o.add_param_group({"params": [new(), new(7)], "lr": 0.5}),
    "a missing gradient": lambda o, ps: setattr(ps[1], "grad", None),
    "a dropped parameter": lambda o, ps: o.param_groups[0]["params"].pop(2),
    **{
        f"{key} = {value}": lambda o, ps, key=key, value=value: o.param_groups[0].update({key: value})
        for key, value in [
            ("lr", 0.125), ("weight_decay", 0.5), ("betas", (0.5, 0.75)), ("maximize", True),
            ("lr", torch.tensor(0.0625)),
        ]
    },
}  # fmt: skip
OTHER_LAUNCHES: dict[str, Change] = {
    "a turned parameter": lambda o, ps: replace(ps[3], "data", ps[3].data.t().contiguous().t()),
    "a parameter turned in place": lambda o, ps: replace(ps[4], "data", ps[4].data.t()),
    "a turned gradient": lambda o, ps: replace(ps[3], "grad", ps[3].grad.t().contiguous().t()),
    "a narrow parameter": lambda o, ps: replace(ps[1], "data", ps[1].data.bfloat16()),
    "another decay": lambda o, ps: o.param_groups[0].update(cautious_weight_decay=True),
}
# changes that need groups of their own: betas in a list, a rate in a tensor, a decay that leaves the rate out
IN_GROUPS: dict[str, Change] = {
    "written betas": lambda o, ps: o.param_groups[1]["betas"].__setitem__(0, 0.5),
    "a written rate": lambda o, ps: o.param_groups[2]["lr"].fill_(0.75),
    "peak_lr": lambda o, ps: o.param_groups[3].update(peak_lr=0.25),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*SEEN, *OTHER_LAUNCHES])
def test_a_change_is_seen(name: str, device: str) -> None:
    """The same change before an optimizer's third step and before the first one of another with its state."""
    params = [torch.randn(s, device=device).requires_grad_() for s in SHAPES]
    optimizer = Lion(params, lr=0.01, weight_decay=0.1)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.step()

    others = [p.detach().clone().requires_grad_() for p in params]
    fresh = Lion(others, lr=0.01, weight_decay=0.1)
    fresh.load_state_dict(optimizer.state_dict())
    for p, q in zip(params, others, strict=True):
        assert p.grad is not None
        q.grad = p.grad.clone()

    old = [p.data for p in params]
    before = [t.clone() for t in old]
    for o, ps in ((optimizer, params), (fresh, others)):
        {**SEEN, **OTHER_LAUNCHES}[name](o, [*ps])
        o.step()
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)
        if "exp_avg" in optimizer.state[p]:
            assert torch.equal(optimizer.state[p]["exp_avg"], fresh.state[q]["exp_avg"])
    if name == "moved parameters":
        assert all(map(torch.equal, old, before)), "memory that is no parameter's any more was written to"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize(
    ("old", "new", "on"),
    [(False, 0.0, True), (0.0, False, False), (1.0, True, True), (True, 1.0, False), (1, True, True),
     (False, np.True_, True)],
)  # fmt: skip
def test_equal_options_of_two_types(
    old: bool | float, new: bool | float, on: bool, foreach: bool | None, device: str
) -> None:
    """cautious=False and 1.0 are off, True and 0.0 are on, and Python finds False equal to 0.0."""
    found = []
    for first in (old, new):
        p = torch.zeros(4, device=device, requires_grad=True)
        optimizer = Lion([p], lr=0.1, cautious=old, foreach=foreach)
        p.grad = torch.ones_like(p)
        optimizer.step()
        if first is new:
            # another optimizer with this state, whose first step has the new option
            state, optimizer = optimizer.state_dict(), Lion([p], lr=0.1, cautious=new, foreach=foreach)
            optimizer.load_state_dict({**state, "param_groups": optimizer.state_dict()["param_groups"]})
        optimizer.param_groups[0]["cautious"] = new
        p.grad = torch.tensor([-0.001, 1.0, -0.001, 1.0], device=device)
        optimizer.step()
        found.append(p.detach())
    assert torch.equal(*found)
    # where half of the updates disagree with the gradient, they are dropped
    assert bool(found[0][0] != found[0][1]) == on


@pytest.mark.parametrize("device", DEVICES)
def test_an_equal_single_element_is_another_parameter(device: str) -> None:
    """Lists of parameters are compared in C, where two different tensors of one equal element pass for the same."""
    p, q = (torch.ones(1, device=device, requires_grad=True) for _ in range(2))
    optimizer = Lion([p, torch.ones(3, device=device, requires_grad=True)], lr=0.25)
    for t in (p, q):
        t.grad = torch.ones_like(t)
    optimizer.step()
    q.data.copy_(p)
    optimizer.param_groups[0]["params"][0] = q
    optimizer.step()
    assert p.item() == 0.75
    assert q.item() == 0.5


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Tables:
    """(words, tensors, groups) of every launch."""
    pytest.importorskip("triton")
    from onepass.ops.lion import kernels
    from onepass.optim import step as steps

    seen: Tables = []

    def launch(table: Tensor, n_chunks: int, n_tensors: int, n_groups: int, *_: Any) -> None:
        seen.append((table.tolist(), n_tensors, n_groups))

    monkeypatch.setattr(kernels, "launch", launch)
    monkeypatch.setattr(steps, "uses_triton", lambda x: True)
    return seen


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


@pytest.mark.parametrize("plain", [True, False], ids=["numbers", "tensors and lists"])
def test_every_launch_reads_what_is_there(tables: Tables, plain: bool) -> None:
    """One optimizer lives through all changes, with plain numbers and with some that can be written to."""
    groups: list[dict[str, Any]] = [{"params": [new(n) for n in (1, 300, 64, 48)]}]
    if not plain:
        groups += [
            {"params": [new()], "betas": [0.9, 0.99]}, {"params": [new()], "lr": torch.tensor(0.5)},
            {"params": [new()], "decouple_lr": True},
        ]  # fmt: skip
    optimizer = Lion(groups, lr=1e-3, weight_decay=0.1)
    changes = {**SEEN, **({} if plain else IN_GROUPS)}
    for name, change in changes.items():
        optimizer.step()
        change(optimizer, params_of(optimizer))
        optimizer.step()
        assert read(tables) == expected(optimizer), name
    assert len(tables) == 2 * len(changes)


@pytest.mark.parametrize(
    "turn",
    [
        lambda p: replace(p, "data", p.data.t().contiguous().t()),
        lambda p: replace(p, "data", p.data.t()),
        lambda p: replace(p.grad, "data", p.grad.data.t()),
    ],
    ids=["elsewhere", "in place", "gradient in place"],
)
def test_a_matrix_that_was_turned_leaves_the_launch(tables: Tables, turn: Callable[[Any], None]) -> None:
    """Its elements lie in another order than its gradient's: as vectors they would meet the wrong ones."""
    matrix = torch.nn.Parameter(torch.randn(6, 6))
    matrix.grad = torch.randn(6, 6)
    optimizer = Lion([new(), matrix, new()], lr=0.125, weight_decay=0.5)
    optimizer.step()
    optimizer.step()
    assert read(tables) == expected(optimizer)
    turn(matrix)
    before, m = matrix.detach().clone(), optimizer.state[matrix]["exp_avg"].clone()
    optimizer.step()
    assert tables[-1][1] == 2
    assert matrix.data_ptr() not in read(tables)[0]
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
    with torch.device("meta"):
        optimizer.step()
    assert read(tables) == expected(optimizer)


def test_a_rate_in_an_array_is_read_at_each_step(tables: Tables) -> None:
    rate = np.array(0.5)
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

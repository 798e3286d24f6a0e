"""The kernels as the optimizer launches them, interpreted and on CUDA; what a step keeps of a launch for the next."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from lion_params import BETAS, GPU_SHAPES, assert_same, clones, make_params, run
from onepass.optim import Lion, clip_grad_norm

BF16 = torch.bfloat16


MODES: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}), (torch.float32, {"state_dtype": "int8"}), (torch.float16, {"state_dtype": "int8"}),
    (BF16, {"state_dtype": "int8", "low_precision": "none"}),
    (BF16, {"state_dtype": "int8", "low_precision": "remainder"}),
    (torch.float32, {"cautious": True}), (BF16, {"cautious": 0.25, "cautious_weight_decay": True}),
    (BF16, {"cautious": True, "state_dtype": "int8"}),
]  # fmt: skip
# interpreted conversions to bf16 truncate
INTERPRETED: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {"state_dtype": "int8"}), (torch.float16, {"state_dtype": torch.float32}),
    (BF16, {"low_precision": "remainder", "state_dtype": "int8"}),
    (torch.float32, {"cautious": True, "cautious_weight_decay": True}),
    (torch.float32, {"cautious": 0.3, "state_dtype": "int8"}),
]  # fmt: skip


@pytest.mark.interpret
@pytest.mark.parametrize(("dtype", "options"), INTERPRETED, ids=str)
def test_a_step_is_the_torch_paths(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """What the machine leaves out under the interpreter; on CUDA it leaves out nothing."""
    a = make_params(dtype, [(7,), (4096,), (5001,), (300,)])
    b = clones(a)
    given = {"lr": 1e-3, "weight_decay": 0.1, "betas": BETAS, **options}
    ours, plain = Lion(a, **given), Lion(b, **{**given, "fused": False, "foreach": False})
    for _ in range(2):
        run(1, (ours, a), (plain, b))
        assert ours._work is not None
        assert ours._work.all_fused
        assert plain._work is not None
        assert not plain._work.fused
    for p, q in zip(a, b, strict=True):
        # fp32 may round a tie, or a code, to the other side; then the weight differs by the step
        differ = (p.double() - q.double()).abs() > 1e-6 + 2.0**-9 * q.double().abs() * (dtype.itemsize == 2)
        assert differ.sum() <= 1 + p.numel() // 1000
        for key, value in plain.state[q].items():
            other = ours.state[p][key]
            assert other.dtype == value.dtype
            if value.dtype == torch.int8:
                assert (other != value).sum() <= p.numel() // 200


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "options"), MODES, ids=str)
def test_a_launch_repeats_resumes_and_does_not_depend_on_grouping(dtype: torch.dtype, options: dict[str, Any]) -> None:
    start = make_params(dtype, [*GPU_SHAPES, (5000,)], "cuda")

    def train(optimizer: Lion, params: list[Tensor], seed: int) -> None:
        torch.manual_seed(seed)
        run(3, (optimizer, params))

    results = []
    for apart in (False, False, True):
        params = clones(start)
        groups = [{"params": [p]} for p in params] if apart else [{"params": params}]
        optimizer = Lion(groups, lr=1e-3, weight_decay=0.1, **options)
        train(optimizer, params, 1)
        if len(results) == 1:
            state, params = optimizer.state_dict(), clones(params)
            optimizer = Lion(params, lr=5.0)
            optimizer.load_state_dict(state)
        train(optimizer, params, 2)
        results.append([p.detach() for p in params] + [optimizer.state[p]["exp_avg"] for p in params])
    for other in results[1:]:
        assert_same(results[0], other)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_code_in_every_place(device: str, dtype: torch.dtype) -> None:
    """Without a gradient momenta shrink, all of a block alike: codes stay, and weights move by their signs."""
    blocks = torch.stack([torch.arange(-128, 128).roll(i) for i in range(17)])
    codes = blocks.to(torch.int8).view(-1).to(device)
    scales = torch.logspace(-30, 30, 17).to(device)
    p = torch.zeros(codes.numel(), dtype=dtype, device=device, requires_grad=True)
    p.grad = torch.zeros_like(p)
    optimizer = Lion([p], lr=0.5, betas=(0.9, 0.75), state_dtype="int8", low_precision="none")
    optimizer.state[p].update(exp_avg=codes.clone(), exp_avg_scale=scales.clone())
    optimizer.step()
    state = optimizer.state[p]
    assert torch.equal(state["exp_avg"], codes)
    assert torch.allclose(state["exp_avg_scale"], scales * 0.75, rtol=1e-6, atol=0)
    want = -0.5 * codes.sign().float()
    want[codes == -128] = float("nan")
    assert torch.equal(p.detach().float().nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.interpret
def test_interpreted_norm_kernel() -> None:
    params = [torch.randn(n).requires_grad_() for n in (1, 1023, 1024, 70_001, 300)]
    params.append(torch.randn(50).half().requires_grad_())
    optimizer = Lion(params)
    for p in params:
        p.grad = torch.randn_like(p)
    want = torch.nn.utils.get_total_norm([p.grad.double() for p in params if p.grad is not None])
    norms = [clip_grad_norm(params, 2.0) for _ in range(3)]
    assert optimizer._work is not None
    assert optimizer._work.all_fused
    assert all(torch.equal(n, norms[0]) for n in norms)
    assert abs(norms[0] - want) < 1e-5 * want
    assert optimizer.clip_coefficient is not None
    assert abs(optimizer.clip_coefficient - 2.0 / want) < 1e-6
    momenta = [p.grad.float() * (2.0 / float(want)) * 0.01 for p in params if p.grad is not None]
    optimizer.step()
    for p, m in zip(params, momenta, strict=True):
        assert torch.allclose(optimizer.state[p]["exp_avg"].float(), m, rtol=1e-2 if p.dtype == torch.half else 1e-5)


@pytest.mark.interpret
def test_dtypes_that_no_kernel_has_take_the_torch_path() -> None:
    for dtype in (torch.complex128, torch.float8_e4m3fn):
        p = torch.ones(3, dtype=dtype).requires_grad_()
        p.grad = torch.ones(3).to(dtype)
        Lion([p], lr=0.5).step()
        assert torch.equal(p.detach().to(torch.complex128), torch.full((3,), 0.5, dtype=torch.complex128))


# of every launch: words, tensors, groups. CPU tensors stand for a GPU's, and nothing runs
Tables = list[tuple[list[int], int, int]]


def new(n: int = 64) -> Any:
    p = torch.nn.Parameter(torch.randn(n))
    p.grad = torch.randn(n)
    return p


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


def test_zero_takes_the_place_of_a_devices_rate(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that a device knows has bytes of 0, too."""
    from onepass.optim import step as steps

    monkeypatch.setattr(steps, "row_of", lambda group, row_of=steps.row_of: row_of(group)._replace(lr=group["lr"]))
    optimizer = Lion([new()], lr=torch.tensor(0.5))
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert [torch.tensor(words[:1]).view(torch.float32)[0].item() for words, *_ in tables] == [0.5, 0.0]


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

"""`replayed`: a call is replayed only where the replay is the same call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from fake_gpu import FakeGpu, counted, everywhere, scale
from onepass.core.launch import compiled as core
from onepass.core.launch import replay, replayed
from onepass.ops.norm import definition

GRID = (1, 1, 1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setattr(replay, "_on_gpu", lambda x: True)
    return FakeGpu()


def program(
    gpu: FakeGpu, made: Callable[[Tensor], Any] = torch.empty_like,
    tensors: Callable[[Tensor, Any], tuple[Tensor, ...]] = lambda x, y: (x, y),
    result: Callable[[Tensor, Any], Any] = lambda x, y: y, a: Callable[[Tensor], float] = lambda x: 1.0,
) -> Callable[..., Any]:  # fmt: skip
    """A call that makes y, launches a kernel on some tensors, and returns something of both."""

    def run(x: Tensor, *_: Tensor) -> Any:
        y = made(x)
        if given := tensors(x, y):
            gpu.launch(GRID, given, a(x))
        return result(x, y)

    return run


def four_calls(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """Arguments and result of four calls, the last two of which are replayed."""
    run, calls = counted(function)
    for _ in range(4):
        given = [torch.randn(shape) for shape in shapes]
        yield *given, run(*given)
    assert calls == [2]


def of_triton(*tensors: Tensor) -> None:
    core.launch_specialized({(1,): lambda *args, **options: None}, (1,), *tensors)


def test_the_third_call_launches_the_same_with_its_own_tensors(gpu: FakeGpu, packed: bool) -> None:
    """Whether a launcher takes the kernel's arguments one by one or as one tuple."""
    gpu.packed = packed
    run, calls = counted(scale(gpu))
    for _ in range(2):
        run(torch.randn(4, 8), None, 0.5)
    x = torch.randn(4, 8)
    gpu.launched.clear()
    y, none = run(x, None, 0.5)
    assert calls == [2]
    assert (y.shape, y.dtype, none) == (x.shape, x.dtype, None)
    (first, second) = gpu.launched
    sums = second[5][1] if packed else second[6]
    own = (x.data_ptr(), None, y.data_ptr(), sums, 0.5), (x.data_ptr(), sums, 0.5)
    assert first == (4, 1, 1, "stream", "head", *((own[0],) if packed else own[0]))
    assert second == (1, 1, 1, "stream", "head", *((own[1],) if packed else own[1]))


@pytest.mark.parametrize(
    "other",
    [lambda x: (x[:3], None, 0.5), lambda x: (x.t(), None, 0.5), lambda x: (x.double(), None, 0.5),
     lambda x: (x, x, 0.5), lambda x: (x, None, 0.25)],
    ids=["shape", "stride", "dtype", "another tensor", "value"],
)  # fmt: skip
def test_another_layout_is_another_call(gpu: FakeGpu, other: Callable[[Tensor], tuple[Any, ...]]) -> None:
    run, calls = counted(scale(gpu))
    x = torch.randn(8, 8)
    for _ in range(3):
        run(x, None, 0.5)
    assert calls == [2]
    run(*other(x))
    assert calls == [3]


def test_another_state_is_another_call(gpu: FakeGpu) -> None:
    """As the precision of products, which decides the tiles of attention."""
    state = [0]
    run, calls = counted(scale(gpu), lambda: state[0])
    for state[0] in (0, 0, 0, 1, 1, 1, 0):
        run(torch.randn(4, 8), None, 0.5)
    assert calls == [4]


CONSTANT = torch.ones(8)
NEVER: dict[str, dict[str, Callable[..., Any]]] = {
    "a copy is read": {"tensors": lambda x, y: (x.t().contiguous(), y)},
    "torch writes": {"made": lambda x: torch.empty_like(x).fill_(2)},
    "a number is read": {"a": lambda x: x[0, 0].item()},
    "an argument is returned": {"made": lambda x: x},
    "some rows": {"result": lambda x, y: y[:2]},
    "transposed": {"result": lambda x, y: y.t()},
    "two shapes of one": {"result": lambda x, y: (y, y.view(-1))},
    "a stranger is read": {"tensors": lambda x, y: (x, CONSTANT, y)},
    "two parts of one": {"made": lambda x: torch.empty(2, *x.shape), "result": lambda x, y: (y[0], y[1])},
    "no elements": {"result": lambda x, y: torch.empty(0)},
    "nothing launched": {"tensors": lambda x, y: ()},
    "an allocation elsewhere": {"made": lambda x: (torch.empty_like(x), torch.empty(4, device="meta"))[0]},
    "a launch that triton does itself": {"result": lambda x, y: of_triton(x, y) or y},
}


@pytest.mark.parametrize("name", NEVER)
def test_what_cannot_be_replayed_runs_as_written_for_ever(gpu: FakeGpu, name: str) -> None:
    run, calls = counted(program(gpu, **NEVER[name]))
    for _ in range(5):
        run(torch.randn(4, 4))
    assert calls == [5]


def test_the_first_argument_may_be_missing(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_on_gpu", lambda x: isinstance(x, Tensor))
    call = scale(gpu)
    run, calls = counted(lambda nothing, x, a: call(x, nothing, a))
    for _ in range(4):
        x = torch.randn(4, 8)
        gpu.launched.clear()
        run(None, x, 0.5)
        assert gpu.launched[0][5] == x.data_ptr()
    assert calls == [2]


def test_zeros_are_zeros_again(gpu: FakeGpu) -> None:
    for _, y in four_calls(program(gpu, made=lambda x: torch.zeros(x.shape, dtype=torch.int64)), (64, 64)):
        assert y.dtype == torch.int64
        assert not y.count_nonzero()
        # as a kernel would, so that memory that is used again holds something
        y.fill_(7)


def test_one_tensor_returned_twice(gpu: FakeGpu) -> None:
    for _, (a, b) in four_calls(program(gpu, result=lambda x, y: (y, y)), (4, 4)):
        assert a is b


def test_what_stood_in_the_way_once_does_not_for_ever(gpu: FakeGpu) -> None:
    """A profiler's hook, a misaligned tensor or a first compilation while the call was recorded."""
    in_the_way = [True]

    def function(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        of_triton(x, y) if in_the_way[0] else gpu.launch(GRID, (x, y), 1.0)
        return y

    run, calls = counted(function)
    for _ in range(4):
        run(torch.randn(4, 4))
    in_the_way[0] = False
    for _ in range(8):
        run(torch.randn(4, 4))
    # the second, third, fifth call is recorded
    assert calls == [5]


def test_misaligned_tensors_other_devices_and_profilers_run_as_written(gpu: FakeGpu) -> None:
    run, calls = counted(scale(gpu))
    x = torch.randn(4, 8)
    for _ in range(3):
        run(x, None, 0.5)
    storage = torch.randn(33)
    assert (storage[1:].data_ptr() & 15) == 4
    run(storage[1:].view(4, 8), None, 0.5)
    assert calls == [3]
    gpu.device = 1
    run(x, None, 0.5)
    assert calls == [4]
    gpu.device = None
    gpu.hooks.launch_enter_hook.calls.append(print)
    run(x, None, 0.5)
    assert calls == [5]
    gpu.hooks.launch_enter_hook.calls.clear()
    run(x, None, 0.5)
    assert calls == [5]


def test_a_tensor_given_twice_is_not_taken_for_two(gpu: FakeGpu) -> None:
    run, calls = counted(scale(gpu))
    x = torch.randn(4, 8)
    for _ in range(3):
        run(x, x, 0.5)
    assert calls == [3]
    for _ in range(2):
        gpu.launched.clear()
        bias = torch.randn(4, 8)
        run(x, bias, 0.5)
        assert gpu.launched[0][5:7] == (x.data_ptr(), bias.data_ptr())
    assert calls == [4]


def test_threads_record_and_replay_side_by_side(gpu: FakeGpu) -> None:
    run = replayed(scale(gpu))

    def calls(n: int) -> list[tuple[Tensor, Tensor]]:
        inputs = [torch.randn(4, 8 + i % 5) for i in range(n)]
        return [(x, run(x, None, 0.5)[0]) for x in inputs]

    with ThreadPoolExecutor(4) as threads:
        found = [pair for pairs in threads.map(calls, [50] * 4) for pair in pairs]
    launched = {args[5:8] for args in gpu.launched if args[0] == 4}
    assert launched == {(x.data_ptr(), None, y.data_ptr()) for x, y in found}
    assert len(launched) == 200
    assert core._recording.listener is None


def test_an_error_leaves_no_recording_behind(gpu: FakeGpu) -> None:
    run = replayed(lambda x: [].pop())
    for _ in range(3):
        with pytest.raises(IndexError):
            run(torch.randn(2))
    assert core._recording.listener is None
    assert not torch._C._len_torch_dispatch_stack()


@pytest.mark.parametrize(("name", "value"), [("_MAX_PLANS", 4), ("REPLAY", False)])
def test_memory_of_layouts_is_bounded_and_can_be_turned_off(
    gpu: FakeGpu, name: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ONEPASS_REPLAY=0` is read at import, where `replayed` wraps an operator's functions."""
    monkeypatch.setattr(replay, name, value)
    run, calls = counted(scale(gpu))
    for i in range(20):
        run(torch.randn(1 + i % 10, 8), None, 0.5)
    assert calls == [20]


def test_overlapping_arguments_are_told_apart_by_where_they_begin(gpu: FakeGpu) -> None:
    """q and k of a packed projection: each lies within the other's first and last byte."""
    run, calls = counted(scale(gpu))
    packed = torch.randn(4, 24)
    for _ in range(2):
        run(packed[:, :8], packed[:, 8:16], 0.5)
    # another distance, another order
    for q, k in (
        (packed[:, 8:16], packed[:, 16:]),
        (packed[:, 16:], packed[:, :8]),
        (packed[:, :8], torch.randn(4, 24)[:, :8]),
    ):
        gpu.launched.clear()
        run(q, k, 0.5)
        assert gpu.launched[0][5:7] == (q.data_ptr(), k.data_ptr())
        assert gpu.launched[1][5] == q.data_ptr()
    assert calls == [2]


def test_a_view_that_may_begin_where_another_argument_does_is_not_recorded(gpu: FakeGpu) -> None:
    def function(x: Tensor, other: Tensor) -> Tensor:
        y = torch.empty_like(x)
        for part in x.split(4, 1):
            gpu.launch((1, 1, 1), (part, other, y), 1.0)
        return y

    run, calls = counted(function)
    packed = torch.randn(4, 12)
    for _ in range(4):
        run(packed[:, :8], packed[:, 4:])
    assert calls == [4]


# one program or several for a row, teams that are launched one way or the other, forward and backward
_WIDTHS = [(64, 1024), (3, 5, 384), (9, 768), (2, 3000), (4, 5120), (4, 16384), (3, 40000), (2, 65536), (2, 262144)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", _WIDTHS, ids=str)
@pytest.mark.parametrize("name", ["weighted_sum", "layer_norm", "rms_norm", "stable", "residual"])
def test_the_operators_calls_are_replayed(
    gpu: FakeGpu, name: str, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but allocations, views and launches lies between their arguments and their results."""
    if name == "stable" and shape[-1] > 8192:
        pytest.skip("torch computes such rows")
    pytest.importorskip("triton")
    written = []

    def launch(kernel: Any, grid: Any, tensors: Any, numbers: Any, constants: Any, **options: Any) -> None:
        written.append(kernel)
        gpu.launch(grid, tensors, 1.0)

    of_gpu = {"sm_count": lambda x: 132, "dependent_launch": lambda x: True, "uses_triton": lambda *tensors: True}
    everywhere(monkeypatch, launch=launch, **of_gpu)
    # torch's operator of a CPU stands aside
    monkeypatch.setattr(definition, "INTERPRET", True)
    x, r, w, b = (torch.empty(s, dtype=dtype, requires_grad=True) for s in (shape, shape, shape[-1], shape[-1]))
    call = {
        "weighted_sum": lambda: (onepass.weighted_sum(x, w),),
        "layer_norm": lambda: (onepass.layer_norm(x, w, b),),
        "rms_norm": lambda: (onepass.rms_norm(x, w),),
        "stable": lambda: (onepass.layer_norm(x, w, b, stable=True),),
        "residual": lambda: onepass.layer_norm(x, w, b, residual=r),
    }[name]
    for _ in range(5):
        torch.autograd.backward(outs := call(), [torch.empty_like(y) for y in outs])
    # the first two calls run as written
    assert 5 * len(written) == 2 * len(gpu.launched) > 0

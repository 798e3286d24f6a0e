"""`replayed`: a call is replayed only where the replay is the same call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_gpu import FakeGpu, counted, scale
from onepass.core.launch import compiled as core
from onepass.core.launch import replay, replayed


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setattr(replay, "_on_gpu", lambda x: True)
    return FakeGpu()


def test_the_third_call_launches_the_same_with_its_own_tensors(gpu: FakeGpu) -> None:
    run, calls = counted(scale(gpu))
    for _ in range(2):
        run(torch.randn(4, 8), None, 0.5)
    x = torch.randn(4, 8)
    gpu.launched.clear()
    y, none = run(x, None, 0.5)
    assert calls == [2]
    assert (y.shape, y.dtype, none) == (x.shape, x.dtype, None)
    (first, second) = gpu.launched
    assert first[:7] == (4, 1, 1, "stream", "head", x.data_ptr(), None)
    assert first[7] == y.data_ptr()
    assert first[9] == 0.5
    assert second == (1, 1, 1, "stream", "head", x.data_ptr(), first[8], 0.5)


def test_a_launcher_that_takes_the_kernels_arguments_as_one_tuple(gpu: FakeGpu) -> None:
    gpu.packed = True
    run, calls = counted(scale(gpu))
    for _ in range(2):
        run(torch.randn(4, 8), None, 0.5)
    x = torch.randn(4, 8)
    gpu.launched.clear()
    y, _ = run(x, None, 0.5)
    assert calls == [2]
    (first, second) = gpu.launched
    sums = second[5][1]
    assert first == (4, 1, 1, "stream", "head", (x.data_ptr(), None, y.data_ptr(), sums, 0.5))
    assert second == (1, 1, 1, "stream", "head", (x.data_ptr(), sums, 0.5))


@pytest.mark.parametrize(
    "other",
    [
        lambda x: (x[:3], None, 0.5),
        lambda x: (x.t(), None, 0.5),
        lambda x: (x.double(), None, 0.5),
        lambda x: (x, x, 0.5),
        lambda x: (x, None, 0.25),
    ],
    ids=["shape", "stride", "dtype", "another tensor", "value"],
)
def test_another_layout_is_another_call(gpu: FakeGpu, other: Callable[[Tensor], tuple[Any, ...]]) -> None:
    run, calls = counted(scale(gpu))
    x = torch.randn(8, 8)
    for _ in range(3):
        run(x, None, 0.5)
    assert calls == [2]
    run(*other(x))
    assert calls == [3]


def _copied(x: Tensor, launch: Callable[..., None]) -> Tensor:
    y = torch.empty_like(x)
    launch((1, 1, 1), (x.t().contiguous(), y), 1.0)
    return y


def _filled(x: Tensor, launch: Callable[..., None]) -> Tensor:
    y = torch.empty_like(x).fill_(2)
    launch((1, 1, 1), (x, y), 1.0)
    return y


def _looked_at(x: Tensor, launch: Callable[..., None]) -> Tensor:
    y = torch.empty_like(x)
    launch((1, 1, 1), (x, y), x[0, 0].item())
    return y


def _own_argument(x: Tensor, launch: Callable[..., None]) -> Tensor:
    launch((1, 1, 1), (x, x), 1.0)
    return x


def _first_rows(x: Tensor, launch: Callable[..., None]) -> Tensor:
    y = torch.empty_like(x)
    launch((1, 1, 1), (x, y), 1.0)
    return y[:2]


def _transposed(x: Tensor, launch: Callable[..., None]) -> Tensor:
    y = torch.empty_like(x)
    launch((1, 1, 1), (x, y), 1.0)
    return y.t()


def _two_shapes(x: Tensor, launch: Callable[..., None]) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x)
    launch((1, 1, 1), (x, y), 1.0)
    return y, y.view(-1)


_CONSTANT = torch.ones(8)


def _a_stranger(x: Tensor, launch: Callable[..., None]) -> Tensor:
    y = torch.empty_like(x)
    launch((1, 1, 1), (x, _CONSTANT, y), 1.0)
    return y


def _two_parts(x: Tensor, launch: Callable[..., None]) -> tuple[Tensor, Tensor]:
    y = torch.empty(2, *x.shape)
    launch((1, 1, 1), (x, y), 1.0)
    return y[0], y[1]


def _no_elements(x: Tensor, launch: Callable[..., None]) -> Tensor:
    launch((1, 1, 1), (x, torch.empty_like(x)), 1.0)
    return torch.empty(0)


def _nothing_launched(x: Tensor, launch: Callable[..., None]) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize(
    "function",
    [
        _copied, _filled, _looked_at, _own_argument, _first_rows, _transposed, _two_shapes, _a_stranger,
        _two_parts, _no_elements, _nothing_launched,
    ],
)  # fmt: skip
def test_what_cannot_be_replayed_runs_as_written_for_ever(gpu: FakeGpu, function: Callable[..., Any]) -> None:
    run, calls = counted(lambda x: function(x, gpu.launch))
    for _ in range(5):
        run(torch.randn(4, 4))
    assert calls == [5]


def test_a_view_of_all_of_an_allocation_is_allocated_in_its_shape(gpu: FakeGpu) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y, z = torch.empty_like(x), torch.empty(3, 2)
        gpu.launch((1, 1, 1), (x, y, z), 1.0)
        return z.view(2, 3), y.view(-1)

    run, calls = counted(function)
    for _ in range(4):
        z, y = run(torch.randn(4, 4))
        assert (z.shape, y.shape) == ((2, 3), (16,))
        assert gpu.launched[-1][6:8] == (y.data_ptr(), z.data_ptr())
    assert calls == [2]
    assert not y._is_view()


def test_parts_of_tensors_are_found_where_they_begin(gpu: FakeGpu) -> None:
    def function(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        gpu.launch((1, 1, 1), (x[2], y[1], y[:, 1:]), 1.0)
        return y

    run, calls = counted(function)
    for _ in range(4):
        x = torch.randn(4, 4)
        y = run(x)
        assert gpu.launched[-1][5:8] == (x[2].data_ptr(), y[1].data_ptr(), y.data_ptr() + 4)
    assert calls == [2]


def test_a_call_that_only_writes_to_its_arguments_returns_none_again(gpu: FakeGpu) -> None:
    run, calls = counted(lambda x, into: gpu.launch((1, 1, 1), (x, into), 1.0))
    for _ in range(4):
        x, into = torch.randn(4, 4), torch.empty(4, 4)
        gpu.launched.clear()
        assert run(x, into) is None
        assert gpu.launched[0][5:7] == (x.data_ptr(), into.data_ptr())
    assert calls == [2]


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
    def function(x: Tensor) -> Tensor:
        y = torch.zeros(x.shape, dtype=torch.int64)
        gpu.launch((1, 1, 1), (x, y), 1.0)
        return y

    run, calls = counted(function)
    for _ in range(4):
        y = run(torch.randn(64, 64))
        assert y.dtype == torch.int64
        assert not y.count_nonzero()
        # as a kernel would, so that memory that is used again holds something
        y.fill_(7)
    assert calls == [2]


def test_one_tensor_returned_twice(gpu: FakeGpu) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.empty_like(x)
        gpu.launch((1, 1, 1), (x, y), 1.0)
        return y, y

    run, calls = counted(function)
    for _ in range(4):
        a, b = run(torch.randn(4, 4))
        assert a is b
    assert calls == [2]


def test_a_replayed_call_inside_another_is_seen(gpu: FakeGpu) -> None:
    inner, inner_calls = counted(scale(gpu))

    def function(x: Tensor) -> Tensor:
        y, _ = inner(x, None, 0.5)
        return y

    for _ in range(3):
        inner(torch.randn(4, 8), None, 0.5)
    assert inner_calls == [2]
    run, calls = counted(function)
    for _ in range(4):
        gpu.launched.clear()
        run(torch.randn(4, 8))
        assert len(gpu.launched) == 2
    assert calls == [2]


def test_what_stood_in_the_way_once_does_not_for_ever(gpu: FakeGpu) -> None:
    """A profiler's hook, a misaligned tensor or a first compilation while the call was recorded."""
    in_the_way = [True]

    def function(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        if in_the_way[0]:
            core.launch_specialized({(1,): lambda *args, **options: None}, (1,), x, y)
        else:
            gpu.launch((1, 1, 1), (x, y), 1.0)
        return y

    run, calls = counted(function)
    for _ in range(4):
        run(torch.randn(4, 4))
    in_the_way[0] = False
    for _ in range(8):
        run(torch.randn(4, 4))
    # the second, third, fifth call is recorded
    assert calls == [5]


def test_an_allocation_elsewhere_is_not_replayed_here(gpu: FakeGpu) -> None:
    def function(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        torch.empty(4, device="meta")
        gpu.launch((1, 1, 1), (x, y), 1.0)
        return y

    run, calls = counted(function)
    for _ in range(5):
        run(torch.randn(4, 4))
    assert calls == [5]


def test_a_launch_that_triton_does_itself_is_not_replayed(gpu: FakeGpu) -> None:
    def function(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        gpu.launch((1, 1, 1), (x, y), 1.0)
        core.launch_specialized({(1,): lambda *args, **options: None}, (1,), x, y)
        return y

    run, calls = counted(function)
    for _ in range(5):
        run(torch.randn(4, 4))
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
    def function(x: Tensor) -> Tensor:
        raise ValueError("no")

    run = replayed(function)
    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            run(torch.randn(2))
    assert core._recording.listener is None
    assert not torch._C._len_torch_dispatch_stack()


def test_memory_of_layouts_is_bounded(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MAX_PLANS", 4)
    run, calls = counted(scale(gpu))
    for n in range(1, 20):
        run(torch.randn(n, 8), None, 0.5)
    assert calls == [19]


def test_replay_can_be_turned_off(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ONEPASS_REPLAY=0` is read at import, where `replayed` wraps an operator's functions."""
    monkeypatch.setattr(replay, "REPLAY", False)
    run, calls = counted(scale(gpu))
    for _ in range(5):
        run(torch.randn(4, 8), None, 0.5)
    assert calls == [5]

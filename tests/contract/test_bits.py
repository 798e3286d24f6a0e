"""docs/reliability.md: the bits of a row depend on this row, its width, dtype, device and the options alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from harness import CPU_DTYPES, GPU_DTYPES, SPECS, maker
from onepass.core.launch import INTERPRET
from onepass.ops.causal_choice.op import causal_choice

Function = Callable[[Tensor], Any]

NAMES = [name for spec in SPECS for name in spec.of_rows(maker("cpu", torch.float32), 8)]
# of compiled calls and of long rows on a CPU
TWO_DTYPES = [torch.float32, torch.bfloat16]
CPU_WIDTHS = [7] if INTERPRET else [1, 7, 257, 1000]
# programs with several rows, with one, with chunks of one; packed, reread and team kernels
GPU_WIDTHS = [1, 7, 64, 100, 512, 1000, 3000, 4096, 8192, 16384, 20000, 32768, 65536, 131072, 1000003, 1048576]


def calls(name: str, device: str, dtype: torch.dtype, width: int) -> Function:
    """The named call of some operator."""
    make = maker(device, dtype)
    return next(made[name] for made in (spec.of_rows(make, width) for spec in SPECS) if name in made)


@functools.cache
def promised(width: int, device: str = "cpu") -> set[str]:
    """The calls whose bits are promised for rows of this width."""
    return {name for spec in SPECS for name in spec.of_rows(maker(device, torch.float32), width)}


def rows_of(device: str, dtype: torch.dtype, rows: int, width: int) -> Tensor:
    """Rows of different sizes and means, so that iterations end at different steps."""
    make = maker(device, torch.float32)
    x = make(rows, width) * (1 + make(rows, 1).abs() ** 3) + 3 * make(rows, 1)
    return x.to(dtype)


def results(out: Any) -> list[Tensor]:
    return [t.detach() for t in ([out] if isinstance(out, Tensor) else out)]


def same(actual: Any, expected: Any, rows: Any, what: str) -> None:
    """Bit for bit; NaN is NaN."""
    for a, e in zip(results(actual), results(expected), strict=True):
        torch.testing.assert_close(a, e[rows], rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{what}: {m}")


def at_offset(x: Tensor, offset: int) -> Tensor:
    """The same values, so many elements behind the start of an allocation."""
    return x.new_empty(x.numel() + offset)[offset:].view(x.shape).copy_(x)


def padded(x: Tensor, more: int) -> Tensor:
    """The same values in longer rows; what lies between is NaN."""
    wide = torch.full((len(x), x.shape[1] + more), torch.nan, dtype=x.dtype, device=x.device)
    return wide[:, : x.shape[1]].copy_(x)


def company(f: Function, x: Tensor) -> None:
    """Alone, a slice, another place, with many others, beside rows that hold something else."""
    y = f(x)
    for i in {1} if INTERPRET else {0, 1, len(x) // 2, len(x) - 1}:
        same(f(x[i : i + 1]), y, slice(i, i + 1), f"row {i} alone, in place")
        same(f(x[i : i + 1].clone()), y, slice(i, i + 1), f"row {i} alone")
    same(f(x[1:4]), y, slice(1, 4), "a slice")
    order = torch.randperm(len(x), device=x.device)
    same(f(x[order]), y, order, "another order")
    # an interpreted kernel pays for every program
    times = 2 if INTERPRET else max(2, min(64, (1 << (18 if x.is_cuda else 14)) // x.numel()))
    for a, e in zip(results(f(x.repeat(times, 1))), results(y), strict=True):
        for part in a.split(len(x)):
            torch.testing.assert_close(part, e, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"many rows: {m}")
    for other in (x * 1e4, torch.full_like(x, torch.nan), torch.zeros_like(x)):
        same([t[:1] for t in results(f(torch.cat((x[:1], other[1:]))))], y, slice(1), "other company")


def placement(f: Function, x: Tensor) -> None:
    """Storage offsets and row strides."""
    y = f(x)
    for offset in (1, 4) if INTERPRET else (1, 2, 3, 4, 8):
        same(f(at_offset(x, offset)), y, slice(None), f"offset {offset}")
    for more in (1, 8) if INTERPRET else (1, 3, 8):
        same(f(padded(x, more)), y, slice(None), f"rows {more} longer")


def modes(f: Function, x: Tensor) -> None:
    """Gradients wanted or not, recomputed in backward."""
    y = f(x)
    with torch.no_grad():
        same(f(x), y, slice(None), "no_grad")
    leaf = x.clone().requires_grad_()
    same(f(leaf), y, slice(None), "with gradients")
    seen: list[Any] = []

    def noted(t: Tensor) -> Any:
        seen.append(f(t))
        return seen[-1]

    with set_checkpoint_early_stop(False):
        out = checkpoint(noted, leaf, use_reentrant=False)
        first = next(t for t in ([out] if isinstance(out, Tensor) else out) if t.requires_grad)
    first.sum().backward()
    assert len(seen) == 2
    for out in seen:
        same(out, y, slice(None), "a checkpoint")


def compiled(f: Function, x: Tensor, backend: str) -> None:
    torch._dynamo.reset()
    same(torch.compile(f, fullgraph=True, backend=backend)(x), f(x), slice(None), "compiled")


def on_cpu(test: Callable[..., None]) -> Any:
    """One test per operator's call, in widths and dtypes of a CPU."""
    return _each(test, CPU_WIDTHS, CPU_DTYPES[:1] if INTERPRET else CPU_DTYPES)


def _each(
    test: Callable[..., None], widths: Sequence[int], dtypes: Sequence[torch.dtype], names: Sequence[str] = NAMES
) -> Any:
    """One test per operator's call. Of pairs of a width and a dtype it takes every second; its neighbour the others."""

    @pytest.mark.parametrize("name", names)
    def run(name: str) -> None:
        pairs = list(itertools.product(enumerate(widths), enumerate(dtypes)))
        for (i, width), (j, dtype) in pairs:
            if len(pairs) == 1 or (i + j + NAMES.index(name)) % 2 == 0:
                test(name, width, dtype)

    run.__doc__ = test.__doc__
    return run


@on_cpu
def test_company(name: str, width: int, dtype: torch.dtype) -> None:
    company(calls(name, "cpu", dtype, width), rows_of("cpu", dtype, 5 if INTERPRET else 11, width))


@pytest.mark.skipif(INTERPRET, reason="kernels know no threads")
# two threads beside other processes wait for each other at every call of torch: one kind stands for soft_topk's loop
@functools.partial(
    _each, widths=[100, 40000], dtypes=TWO_DTYPES,
    names=[name for name in NAMES if name not in ("soft_topk, capped_exp", "soft_topk, laplace", "soft_topk, clamp")],
)  # fmt: skip
def test_threads(name: str, width: int, dtype: torch.dtype) -> None:
    """Torch shares the sum of one long row among threads, that of several never; many rows are cut by their number."""
    f, x = calls(name, "cpu", dtype, width), rows_of("cpu", dtype, 2 if width > 1000 else 900, width)
    torch.set_num_threads(2)
    y = f(x)
    same(f(x[:1]), y, slice(1), "alone")
    torch.set_num_threads(1)
    same(f(x[:1]), y, slice(1), "alone, one thread")
    if width < 1000:
        same(f(x), y, slice(None), "one thread")


@on_cpu
def test_placement(name: str, width: int, dtype: torch.dtype) -> None:
    f, x = calls(name, "cpu", dtype, width), rows_of("cpu", dtype, 5, width)
    placement(f, x)
    same(f(x.mT.contiguous().mT), f(x), slice(None), "transposed")


@pytest.mark.skipif(INTERPRET, reason="the kernels are the same")
@on_cpu
def test_modes(name: str, width: int, dtype: torch.dtype) -> None:
    modes(calls(name, "cpu", dtype, width), rows_of("cpu", dtype, 5, width))


@pytest.mark.skipif(INTERPRET, reason="compiled code calls the registered op")
@functools.partial(_each, widths=[257], dtypes=TWO_DTYPES)
def test_compiled(name: str, width: int, dtype: torch.dtype) -> None:
    compiled(calls(name, "cpu", dtype, width), rows_of("cpu", dtype, 5, width), "aot_eager")
    if "norm" in name:  # small calls of which take torch's own operators
        f, x = calls(name, "cpu", dtype, 64), rows_of("cpu", dtype, (1 << 19) // 64 + 3, 64)
        compiled(f, x, "aot_eager")
        same(f(x[:9]), f(x), slice(9), "nine of many")


class Problem(NamedTuple):
    """A call and where its rows lie."""

    name: str
    dtype: torch.dtype
    rows: int
    width: int
    offset: int
    more: int
    scale: float


problems = st.builds(
    Problem, st.sampled_from(NAMES), st.sampled_from(CPU_DTYPES), st.integers(2, 40),
    st.integers(1, 300) | st.integers(300, 3000), st.integers(0, 17), st.integers(0, 17),
    st.sampled_from([1e-3, 1.0, 100.0]),
)  # fmt: skip


@pytest.mark.skipif(INTERPRET, reason="too slow")
@settings(max_examples=100)
@given(problems, st.data())
def test_any_rows_anywhere(p: Problem, data: st.DataObject) -> None:
    f, x = calls(p.name, "cpu", p.dtype, p.width), rows_of("cpu", p.dtype, p.rows, p.width) * p.scale
    order = torch.tensor(data.draw(st.lists(st.integers(0, p.rows - 1), min_size=1, max_size=50)))
    y = f(x)
    same(f(at_offset(padded(x[order], p.more), p.offset)), y, order, "picked")


def test_causal_choice_depends_on_its_sequence(device: str) -> None:
    rows, n = (2, 96) if INTERPRET else (5, 600)
    scores = rows_of(device, torch.float32, rows, n)
    options = {"eps": 0.3, "block": 16, "memory": 64}
    all_rows = causal_choice(scores, n // 10, **options)
    for i in range(rows):
        same(causal_choice(scores[i : i + 1], n // 10, **options), all_rows, slice(i, i + 1), f"sequence {i} alone")
    same(causal_choice(at_offset(scores, 3), n // 10, **options), all_rows, slice(None), "offset")


def replays_graphs_and_streams(f: Function, x: Tensor) -> None:
    """The first call, the recorded one and those that are replayed; a CUDA graph; streams beside each other."""
    y = [t.clone() for t in results(f(x))]
    for turn in range(4):
        same(f(x), y, slice(None), f"call {turn + 2}")
    streams = [torch.cuda.Stream() for _ in range(3)]
    outs = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outs.append(f(x))
    torch.cuda.synchronize()
    for out in outs:
        same(out, y, slice(None), "a stream")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = f(x)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    same(captured, y, slice(None), "a CUDA graph")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", NAMES)
def test_rows_on_gpu(name: str, dtype: torch.dtype) -> None:
    """All in one test: apart, several processes would compile the same kernels at the same time."""
    for width in GPU_WIDTHS:
        if name not in promised(width, "cuda"):
            continue
        f, x = calls(name, "cuda", dtype, width), rows_of("cuda", dtype, 5, width)
        replays_graphs_and_streams(f, x)
        placement(f, x)
        modes(f, x)
        company(f, x if width > 20000 else rows_of("cuda", dtype, 37, width))


@pytest.mark.gpu
@pytest.mark.slow
@functools.partial(_each, widths=[7, 1000, 131072], dtypes=[torch.float32, torch.bfloat16])
def test_compiled_on_gpu(name: str, width: int, dtype: torch.dtype) -> None:
    if name in promised(width, "cuda"):
        compiled(calls(name, "cuda", dtype, width), rows_of("cuda", dtype, 5, width), "inductor")

"""Rows that a team of programs shares: every variant against float64, bit for bit the same each time, on any stream."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from onepass import layer_norm, rms_norm
from onepass.core.launch import cdiv
from onepass.ops.norm import definition

launch = pytest.importorskip("onepass.ops.norm.launch")

WIDTHS = [8193, 16384, 20001, 32768, 32769, 40000, 65536, 131073, 262144, 524288, 1000003]


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("shared", [49152, 101376, 232448])
def test_teams_cover_the_row_and_all_rows(itemsize: int, shared: int) -> None:
    for cols, rows, programs in itertools.product(WIDTHS, (1, 5, 1000, 100_000), (20, 132)):
        team = launch.backward_team(cols, itemsize, 2, shared)
        assert team.per_sm * (team.stages - 1) * 2 * team.rows * team.cols * itemsize < shared
        assert (team.size - 1) * team.cols < cols <= team.size * team.cols
        assert team.size <= team.width() < 2 * team.size
        teams = team.teams(rows, programs)
        most = max(1, min(team.per_sm * programs // team.size, cdiv(rows, team.rows)))
        assert 1 <= teams <= most
        assert cdiv(rows, teams * team.rows) == cdiv(rows, most * team.rows), "fewer teams, but no more turns"


def _call(norm, rows: int, cols: int, dtype: torch.dtype, options: dict, seed: int = 0) -> tuple:
    generator = torch.Generator("cuda").manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.float32, generator=generator).to(dtype)

    args = [make(rows, cols) + 1, make(cols), make(cols)][: 3 if norm is layer_norm else 2]
    if options.get("stable"):
        args[0] = (2 * args[0]).round()
        args[0][::3] = -args[0][::3].abs() - 1
    kwargs = {k: make(rows, cols) if v is None else v for k, v in options.items()}
    dys = [make(rows, cols) for _ in range(1 + ("residual" in kwargs))]
    return args, kwargs, dys


def _run(fn, args: list[Tensor], kwargs: dict, dys: list[Tensor]) -> list[Tensor]:
    args = [a.detach().requires_grad_() for a in args]
    kwargs = {k: v.detach().requires_grad_() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    out = fn(*args, **kwargs)
    outs = list(out) if isinstance(out, tuple) else [out]
    wanted = [*args, *(v for v in kwargs.values() if isinstance(v, Tensor))]
    return [o.detach() for o in outs] + list(torch.autograd.grad(outs, wanted, dys))


VARIANTS = [
    (layer_norm, definition.layer_norm, {}),
    (layer_norm, definition.layer_norm, {"residual": None}),
    (layer_norm, definition.layer_norm, {"stable": True, "eps": 0.1}),
    (layer_norm, definition.layer_norm, {"stable": True, "eps": 0.1, "residual": None}),
    (rms_norm, definition.rms_norm, {"offset": 1.0}),
    (rms_norm, definition.rms_norm, {"residual": None}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(("norm", "definition", "options"), VARIANTS)
def test_every_width(norm, definition, options: dict, dtype: torch.dtype) -> None:
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for cols, rows in ((8193, 3), (16384, 300), (32768, 1), (40000, 41), (65536, 300), (131073, 7), (262144, 5)):
        args, kwargs, dys = _call(norm, rows, cols, dtype, options)
        got = _run(norm, args, kwargs, dys)
        # the sum is rounded to its dtype: the definition starts from the same one
        if "residual" in kwargs:
            total = args[0] + kwargs["residual"]
            exact = _run(
                definition, [total.double(), *(a.double() for a in args[1:])],
                {k: v for k, v in kwargs.items() if k != "residual"}, [dys[0].double()],
            )  # fmt: skip
            dx = exact[1] + dys[1].double()
            exact = [exact[0], total.double(), dx, *exact[2:], dx]
        else:
            exact = _run(definition, [a.double() for a in args], kwargs, [d.double() for d in dys])
        for g, e in zip(got, exact, strict=True):
            error = (g.double() - e).abs().max() / e.abs().max()
            assert error < tolerance, f"{cols} columns: {error:.1e}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("cols", [128, 768, 1024, 3000, 8192, 16384, 32768, 40000, 65536, 131072, 300_000])
def test_twenty_times_the_same_bits(cols: int, stable: bool, dtype: torch.dtype) -> None:
    call = _call(layer_norm, max(40, 2**22 // cols), cols, dtype, {"stable": True} if stable else {})
    first = _run(layer_norm, *call)
    for _ in range(20):
        assert all(map(torch.equal, first, _run(layer_norm, *call)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_large_teams_on_six_streams_at_once(dtype: torch.dtype) -> None:
    """More kernels at a time than could all have a few of a large team's programs running and the rest waiting."""
    call = _call(layer_norm, 30, 262144, dtype, {})
    expected = _run(layer_norm, *call)
    streams = [torch.cuda.Stream() for _ in range(6)]
    torch.cuda.synchronize()
    for _ in range(5):
        results = []
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(_run(layer_norm, *call))
        torch.cuda.synchronize()
        assert all(torch.equal(g, w) for got in results for g, w in zip(got, expected, strict=True))


@pytest.mark.gpu
def test_in_a_graph() -> None:
    call = _call(layer_norm, 150, 65536, torch.bfloat16, {})
    expected = _run(layer_norm, *call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _run(layer_norm, *call)
    for _ in range(5):
        for tensor in captured:
            tensor.zero_()
        graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [1024, 40000, 131072])
def test_more_than_two_billion_elements(cols: int) -> None:
    rows = 2**31 // cols + 5
    x = torch.empty(rows, cols, device="cuda", dtype=torch.bfloat16).normal_().requires_grad_()
    w = torch.randn(cols, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.empty_like(x).normal_()
    y = rms_norm(x, w)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    for part in (slice(0, 3), slice(rows // 2, rows // 2 + 3), slice(rows - 3, rows)):
        few, fw = x[part].detach().double().requires_grad_(), w.detach().double().requires_grad_()
        out = definition.rms_norm(few, fw)
        want = torch.autograd.grad(out, few, dy[part].double())[0]
        torch.testing.assert_close(y[part].double(), out, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(dx[part].double(), want, rtol=2e-2, atol=2e-2)
    total = torch.zeros(cols, device="cuda", dtype=torch.float64)
    for start in range(0, rows, 2**27 // cols):
        part = slice(start, start + 2**27 // cols)
        f = x[part].detach().float()
        total += (dy[part].float() * f * (f.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).sum(0, dtype=torch.float64)
    torch.testing.assert_close(dw.double(), total, rtol=1e-2, atol=1e-2 * total.abs().max().item())

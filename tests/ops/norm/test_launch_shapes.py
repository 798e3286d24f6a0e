"""Launch shapes for every width, the kernels for wide rows made small for the interpreter, and teams on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from conftest import INTERPRET
from harness import call, close, float64, gradients
from onepass import layer_norm, rms_norm
from onepass.core.launch import cdiv
from onepass.core.spec import Sample
from onepass.ops.norm import definition

launch = pytest.importorskip("onepass.ops.norm.launch")

WIDTHS = [*range(1, 40), 64, 100, 127, 300, 511, 768, 1000, 1024, 2047, 3000, 4096, 5120, 6144, 7168, 8191, 8192]
WIDE = [9000, 12288, 16384, 20480, 32767, 32768]


def _is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@pytest.mark.parametrize("itemsize", [2, 4])
def test_forward_tiles(itemsize: int) -> None:
    for cols in WIDTHS + WIDE:
        tile = launch.forward_tile(cols, itemsize)
        assert all(map(_is_power_of_two, (tile.rows, tile.cols, tile.warps)))
        chunks = cdiv(cols, tile.cols)
        per_thread = tile.rows * chunks * tile.cols / (32 * tile.warps)
        assert per_thread <= 64, "a row must fit the registers"
        assert cols <= 128 or chunks * tile.cols - cols < max(256, cols / 3), "idle lanes"


@pytest.mark.parametrize("shared", [49152, 101376, 166912, 232448])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_backward_tiles(itemsize: int, shared: int, stable: bool) -> None:
    for cols, tensors in itertools.product(WIDTHS, (2, 3)):
        tile = launch.backward_tile(cols, itemsize, tensors, shared, stable)
        assert all(map(_is_power_of_two, (tile.rows, tile.cols, tile.warps)))
        chunks = cdiv(cols, tile.cols)
        per_thread = tile.rows * chunks * tile.cols / (32 * tile.warps)
        assert per_thread <= (16 if tile.warps == 16 else 24)
        buffered = (tile.stages - 1) * tensors * tile.rows * chunks * tile.cols * itemsize
        assert tile.stages == 2 or buffered <= shared - 4096


def test_a_row_that_fits_no_program_is_refused() -> None:
    with pytest.raises(ValueError, match="8193 columns"):
        launch.backward_tile(8193, 2, 2, 232448)


@pytest.mark.interpret
@pytest.mark.parametrize("cols", [17, 64, 150])
def test_rows_in_tiles(cols: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward in tiles; backward without teams is torch's."""
    for name, value in (("MAX_FORWARD_COLS", 16), ("MAX_BACKWARD_COLS", 16), ("WIDE_WARP_COLS", 2)):
        monkeypatch.setattr(launch, name, value)
    x, r = torch.randn(5, cols) + 2, torch.randn(5, cols)
    ties = (2 * torch.randn(5, cols)).round()
    ties[1] = -ties[1].abs() - 1
    ties[2] = 0
    ties[3] *= 1e12
    w, b = torch.randn(cols), torch.randn(cols)
    for norm, oracle, args, options in (
        (layer_norm, definition.layer_norm, (x, w, b), {}),
        (layer_norm, definition.layer_norm, (x, None, b), {}),
        (layer_norm, definition.layer_norm, (ties, w, b), {"stable": True, "eps": 0.1}),
        (layer_norm, definition.layer_norm, (x, w, b), {"residual": r}),
        (rms_norm, definition.rms_norm, (x, w), {"offset": 1.0}),
        (rms_norm, definition.rms_norm, (x,), {"residual": r}),
    ):
        sample = Sample("", args, options)
        calls = ((norm, sample), (oracle, float64(sample)))
        found, exact = ([*call(fn, given), *gradients(fn, given).values()] for fn, given in calls)
        for a, e in zip(found, exact, strict=True):
            close(a, e, 1e-4, 1e-4, f"{norm.__name__} {[*options]}")


@pytest.mark.skipif(INTERPRET, reason="an interpreted kernel has no parameters")
def test_kernels_do_not_specialise_on_rows_or_strides() -> None:
    from onepass.ops.norm import kernels, kernels_team

    for module in (kernels, kernels_team):
        for name in dir(module):
            for p in getattr(getattr(module, name), "params", ()) if name.endswith("_kernel") else ():
                if not p.is_constexpr and not p.name.endswith("_ptr") and p.name not in ("eps", "offset"):
                    assert p.do_not_specialize, f"{name}: {p.name}"


WIDTHS_OF_TEAMS = [8193, 16384, 20001, 32768, 32769, 40000, 65536, 131073, 262144, 524288, 1000003]


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("shared", [49152, 101376, 232448])
def test_teams_cover_the_row_and_all_rows(itemsize: int, shared: int) -> None:
    for cols, rows, programs in itertools.product(WIDTHS_OF_TEAMS, (1, 5, 1000, 100_000), (20, 132)):
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
    """The definition's numbers, and the same bits each time."""
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    narrow = (128, 32768), (768, 5000), (1024, 4096), (3000, 1400), (8192, 512)
    wide = (8193, 3), (16384, 300), (32768, 1), (40000, 104), (65536, 300), (131072, 40), (131073, 7), (262144, 5)
    for cols, rows in (*narrow, *wide, (300_000, 40)):
        args, kwargs, dys = _call(norm, rows, cols, dtype, options)
        got = _run(norm, args, kwargs, dys)
        for _ in range(20):
            assert all(map(torch.equal, got, _run(norm, args, kwargs, dys))), f"{cols} columns: other bits"
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

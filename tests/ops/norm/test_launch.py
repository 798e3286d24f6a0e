"""Launch shapes for every width, and the kernels for wide rows made small enough for the interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch

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


@pytest.mark.parametrize("stable", [False, True])
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


@pytest.fixture
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MAX_FORWARD_COLS", 16), ("MAX_BACKWARD_COLS", 16), ("WIDE_WARP_COLS", 2)):
        monkeypatch.setattr(launch, name, value)


@pytest.mark.interpret
@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("cols", [17, 64, 150])
def test_rows_in_tiles(cols: int) -> None:
    """Forward in tiles; backward without teams is torch's."""
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

"""Replays that compute: the interpreter runs, on raw addresses, what a recording says was launched."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fake_gpu import no_hooks
from harness import SPECS, build, call, leaves, replace, sample_names
from onepass.core.launch import compiled as core
from onepass.core.launch import replay
from onepass.core.spec import Spec
from onepass.nn import RoutedAttention, RoutedFeedForward

pytestmark = pytest.mark.interpret

NAMES = ("layer_norm", "rms_norm", "qk_norm_rope", "weighted_sum", "topk")
# without rows nothing is launched, eps that broadcasts is copied by torch, two empty tensors share an address: such
# calls have no replay
UNREPLAYED = ("no rows", "no tokens", "eps tensor, mask", "no heads of keys")
SAMPLES = [
    pytest.param(spec, name, id=f"{spec.name}-{name}")
    for i, spec in enumerate(SPECS)
    if spec.name in NAMES
    for name in sample_names(i)[1::6]
    if name not in UNREPLAYED
]


def _at(address: int | None, dtype: torch.dtype | None) -> Tensor | None:
    """A tensor that begins at an address: all that a kernel learns of one."""
    if address is None:
        return None
    assert dtype is not None
    return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)


class _Interpreter:
    """Launches as a GPU would take them: kernels by pointers, whose tensors' names nobody knows any more."""

    # a class's: what one test recorded another may replay
    replays = 0

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        recorder = core._recording.listener
        if recorder is not None:
            n = next(i for i, a in enumerate(args) if not (a is None or isinstance(a, Tensor)))
            dtypes = [None if t is None else t.dtype for t in args[:n]]

            def run(gx: int, gy: int, gz: int, stream: Any, head: str, *rest: Any) -> None:
                _Interpreter.replays += 1
                tensors = [_at(address, dtype) for address, dtype in zip(rest, dtypes, strict=False)]
                kernel[gx, gy, gz](*tensors, *rest[n:], **(core.OPTIONS | options))

            entry = core.Compiled(run, ("head",), lambda: None, lambda index: None, no_hooks(), kernel)
            recorder.launched(entry, grid, args[:n], args[n:])
        # what the interpreter does in torch is no part of the call
        with _disable_current_modes():
            kernel[grid](*args, **(core.OPTIONS | options))


@pytest.fixture
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "launch_specialized", _Interpreter().launch)


def _with_gradients(outs: Any, tensors: list[Tensor]) -> list[Tensor | None]:
    outs = [o for o in outs if isinstance(o, Tensor)]
    live = [o for o in outs if o.requires_grad]
    generator = torch.Generator().manual_seed(3)
    upstream = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in live]
    grads = torch.autograd.grad(live, tensors, upstream, allow_unused=True) if live else []
    return [*(o.detach() for o in outs), *grads]


def _compare(step: Callable[[int], list[Tensor | None]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The third call, which is replayed, against the same without a memory, bit for bit."""
    plain = step(2)
    monkeypatch.setattr(replay, "_on_gpu", lambda x: isinstance(x, Tensor))
    step(0)
    step(1)
    before = _Interpreter.replays
    for a, e in zip(step(2), plain, strict=True):
        assert (a is None) == (e is None)
        if a is not None:
            torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)
    assert _Interpreter.replays > before


@pytest.mark.usefixtures("_interpreter")
@pytest.mark.parametrize(("spec", "name"), SAMPLES)
def test_operators(spec: Spec, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = build(spec, name, "cpu", torch.float32)

    def step(i: int) -> list[Tensor | None]:
        with torch.no_grad():
            scaled = {k: t.clone() * (1 + 0.1 * i) + 0.01 * i for k, t in leaves(sample).items()}
        inputs = {k: t.requires_grad_() for k, t in scaled.items()}
        return _with_gradients(call(spec.op, replace(sample, inputs)), list(inputs.values()))

    _compare(step, monkeypatch)


@pytest.mark.usefixtures("_interpreter")
@pytest.mark.parametrize("module", [
    pytest.param(lambda: RoutedFeedForward(16, k=3), id="feed forward"),
    pytest.param(lambda: RoutedAttention(16, k_q=3, k_kv=4, heads=1, dim_head=16, window=4), id="attention"),
])  # fmt: skip
def test_modules(module: Callable[[], torch.nn.Module], masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    routed = module()
    for p in routed.parameters():
        torch.nn.init.normal_(p, std=0.3)
    mask = torch.arange(10) < torch.tensor([[10], [5]]) if masked else None

    def step(i: int) -> list[Tensor | None]:
        torch.manual_seed(7 + i)
        x = torch.randn(2, 10, 16, requires_grad=True)
        return _with_gradients([routed(x, mask)], [x, *routed.parameters()])

    _compare(step, monkeypatch)

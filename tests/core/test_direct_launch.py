"""`launch`: a remembered compilation is run again only where Triton would have chosen it again."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import onepass
from onepass.core.launch import INTERPRET, launch
from onepass.core.launch import compiled as core

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRET, reason="nothing is compiled")


class _OnGpu:
    """What `launch` looks at in a CUDA tensor."""

    is_cuda = True
    device = SimpleNamespace(index=0)

    def __init__(self, dtype: torch.dtype = torch.float32, address: int = 4096) -> None:
        self.dtype, self.address = dtype, address

    def data_ptr(self) -> int:
        return self.address


class _Kernel:
    """Stands in for a Triton kernel: counts the launches that Triton itself would do, and those it is spared."""

    def __init__(self) -> None:
        self.plain: list[tuple[Any, ...]] = []
        self.direct: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            self.plain.append((grid, args, options))
            return SimpleNamespace(run=lambda *a: self.direct.append(a), function="f", packed_metadata="m")

        return run


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> _Kernel:
    from triton.runtime import driver

    monkeypatch.setattr(core, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    stand_in = SimpleNamespace(get_current_stream=lambda device: 7 + device, get_current_device=lambda: 0)
    monkeypatch.setattr(type(driver), "active", property(lambda self: stand_in))
    return _Kernel()


def _launch(
    kernel: _Kernel, *tensors: Any, numbers: tuple[Any, ...] = (5, 0.5), constants: Any = (16,), **options: Any
):
    launch(kernel, (3, 1, 1), tensors, numbers, constants, num_warps=4, **options)


def test_the_second_launch_runs_what_the_first_compiled(kernel: _Kernel) -> None:
    _launch(kernel, _OnGpu(), None)
    _launch(kernel, _OnGpu(address=8192), None, numbers=(6, 0.25))
    assert len(kernel.plain) == 1
    assert kernel.direct == [(3, 1, 1, 7, "f", "m", None, None, None, 8192, None, 6, 0.25, 16)]


def test_the_tensors_device_is_the_current_one_meanwhile(kernel: _Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda i: mock.patch("torch.cuda.current_device", return_value=i))
    noted: list[int] = []
    monkeypatch.setattr(core, "launch_specialized", lambda *args, **_: noted.append(torch.cuda.current_device()))
    far = mock.Mock(spec=_OnGpu, is_cuda=True, device=SimpleNamespace(index=1), dtype=torch.float32, data_ptr=int)
    for tensors, numbers in (((None, far), (5,)), ((far,), (2**31,)), ((_OnGpu(),), (5,))):
        _launch(kernel, *tensors, numbers=numbers)
    assert noted == [1, 1, 0]


@pytest.mark.parametrize(
    ("tensors", "others"),
    [((_OnGpu(torch.bfloat16), None), {}), ((_OnGpu(), _OnGpu()), {}), ((_OnGpu(address=4104), None), {}),
     *(((_OnGpu(), None), option) for option in ({"constants": (32,)}, {"maxnreg": 128}, {"numbers": (2**31, 0.5)}))],
    ids=["dtype", "another tensor", "alignment", "constants", "options", "64-bit integer"],
)  # fmt: skip
def test_another_compilation(kernel: _Kernel, tensors: tuple[Any, ...], others: dict[str, Any]) -> None:
    _launch(kernel, _OnGpu(), None)
    for _ in range(1 + (tensors[0].address % 16 > 0 or "numbers" in others)):
        _launch(kernel, *tensors, **others)
        assert not kernel.direct
    assert len(kernel.plain) >= 2
    _launch(kernel, _OnGpu(), None)
    assert len(kernel.direct) == 1, "the first one is still there"


class CudaLauncher:
    """That of Triton 3.6 to 3.9, with a C function that takes anything."""

    launch = staticmethod(print)
    launch_cooperative_grid, launch_pdl = False, True
    global_scratch_size, profile_scratch_size = 0, 0
    arg_annotations, kernel_signature = "annotations", "signature"

    def __call__(self, *args: Any) -> None:
        raise AssertionError("the launcher's Python was to be spared")


@pytest.mark.parametrize(("version", "printed"), [
    ("3.6.0", "3 1 1 7 f False True None None m None None None 4096 5 0.5 16\n"),
    *(
        (v, "3 1 1 7 f False True m None None None None None annotations signature (4096, 5, 0.5, 16)\n")
        for v in ("3.7.1", "3.8.0", "3.9.0+git123")
    ),
])  # fmt: skip
def test_the_launchers_c_function_is_called_without_the_python_around_it(
    version: str, printed: str, kernel: _Kernel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import triton

    compiled = SimpleNamespace(run=CudaLauncher(), function="f", packed_metadata="m")
    monkeypatch.setattr(_Kernel, "__getitem__", lambda self, grid: lambda *args, **options: compiled)
    monkeypatch.setattr(triton, "__version__", version)
    for _ in range(2):
        _launch(kernel, _OnGpu())
    assert capsys.readouterr().out == printed


def test_other_launchers_are_called_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton, "__version__", "3.9.0")
    assert core._launcher_version(CudaLauncher()) == "3.9"
    others = {"global_scratch_size": 128, "profile_scratch_size": 8, "launch": lambda *args: None, "gsan_enabled": True}
    for name, value in others.items():
        launcher = CudaLauncher()
        setattr(launcher, name, value)
        assert core._launcher_version(launcher) is None
    for version in ("3.5.1", "3.10.0", "4.0.0"):
        monkeypatch.setattr(triton, "__version__", version)
        assert core._launcher_version(CudaLauncher()) is None


def test_a_profilers_hook_sees_every_launch(kernel: _Kernel) -> None:
    from triton import knobs

    def hook(metadata: Any) -> None:
        pass

    _launch(kernel, _OnGpu())
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        _launch(kernel, _OnGpu())
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert len(kernel.plain) == 2
    assert not kernel.direct


def test_a_launch_past_the_recorder_is_written_nowhere() -> None:
    """`kernel[grid](...)` stands in `launch_specialized` alone; a spec only declares, a TABLE holds plain functions."""
    found = []
    root = Path(onepass.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Subscript) or path.name == "spec.py":
                continue
            # a launch has arguments
            if node.args and not ast.unparse(node.func.value).isupper():
                found.append((str(path.relative_to(root)), ast.unparse(node.func)))
    assert found == [("core/launch/compiled.py", "kernel[grid]")]

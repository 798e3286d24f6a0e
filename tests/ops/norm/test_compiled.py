"""Compiled and exported norms: torch's operations by default, the kernels' operators by ONEPASS_COMPILED_NORMS."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.core.launch import INTERPRET
from onepass.ops.norm import op
from programs import compiled

pytestmark = pytest.mark.skipif(INTERPRET, reason="no kernel is run")

CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "layer_norm": lambda x, w: onepass.layer_norm(x, w, w, eps=1e-3),
    "rms_norm": lambda x, w: onepass.rms_norm(x, w, eps=1e-3, offset=1.0),
    "residual": lambda x, w: onepass.rms_norm(x, w, residual=x.cos())[0],
    "residual in fp32": lambda x, w: onepass.rms_norm(x, w, residual=x.float())[1],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 2.0**57])
@pytest.mark.parametrize("name", CALLS)
def test_torchs_operations_by_default(name: str, scale: float, dtype: torch.dtype) -> None:
    """As exact as the kernels, forward and backward; no operator of ours is in the graph."""
    leaves = torch.randn(6, 48).to(dtype).requires_grad_(), torch.linspace(0.5, 1.5, 48).requires_grad_()
    y, graphs = compiled(lambda x, w: CALLS[name](x * scale, w), *leaves)
    expected = CALLS[name](leaves[0] * scale, leaves[1])
    g = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(t, leaves, g, allow_unused=True) for t in (y, expected))
    assert not [name for graph in graphs for name in graph if "onepass" in name]
    for a, e in zip((y, *ours), (expected, *theirs), strict=True):
        if e is not None:
            torch.testing.assert_close(a, e)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_kernels_on_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "COMPILED", "kernels")
    y, graphs = compiled(CALLS[name], torch.randn(6, 48, requires_grad=True), torch.ones(48, requires_grad=True))
    y.sum().backward()
    assert graphs == [["onepass.norm.default"], ["onepass.norm_backward.default"]]


@pytest.mark.parametrize("name", ["stable", "gate", "twice"])
def test_options_keep_the_kernels(name: str) -> None:
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "stable": lambda x: onepass.layer_norm(x, stable=True),
        "gate": lambda x: onepass.rms_norm(x, gate=x),
        "twice": lambda x: onepass.rms_norm(x, x[0], rounding="twice"),
    }
    assert compiled(calls[name], torch.randn(3, 8))[1] == [["onepass.norm.default"]]


def test_wrong_arguments_are_refused_in_a_compiled_call_too() -> None:
    run = torch.compile(onepass.rms_norm, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"rms_norm: weight must be \(8,\)"):
        run(torch.randn(3, 8), torch.ones(7))


def test_switches_are_read_at_import() -> None:
    """Another value is refused; the command says so in its line. An empty one counts as none."""
    code = """
import os
for name, value in (("BACKEND", ""), ("REPLAY", "0"), ("COMPILED_NORMS", "kernels")):
    try:
        import onepass
    except ValueError as error:
        print(error)
    os.environ[f"ONEPASS_{name}"] = value
from onepass.ops.norm import op
print(op.COMPILED)
"""
    accepted = {"BACKEND": ("auto", "torch"), "REPLAY": ("1", "0"), "COMPILED_NORMS": ("torch", "kernels")}
    told = [f"ONEPASS_{name} must be {a!r} or {b!r}, got '\\x07'\n" for name, (a, b) in accepted.items()]
    env = os.environ | {f"ONEPASS_{name}": "\x07" for name in accepted}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "".join(told) + "kernels\n"
    done = subprocess.run([sys.executable, "-m", "onepass"], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"onepass: {told[0]}")

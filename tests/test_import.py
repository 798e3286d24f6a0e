"""Promise 6: import is harmless. Each check runs in a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

HIDE_TRITON = """
import importlib.abc, importlib.util, sys
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "triton" or name.startswith("triton."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] == "triton" else real(name, package)
"""


def _run(code: str, env: dict[str, str] | None = None) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout


def test_no_cuda_no_triton_no_environment_change() -> None:
    out = _run(
        "import json, os, sys, torch\n"
        "before = dict(os.environ); threads = torch.get_num_threads(); modules = set(sys.modules)\n"
        "import onepass, onepass.nn\n"
        "new = set(sys.modules) - modules\n"
        "print(json.dumps({'env': before == dict(os.environ), 'threads': threads == torch.get_num_threads(),\n"
        "  'cuda': torch.cuda.is_initialized(), 'triton': any(m.split('.')[0] == 'triton' for m in new),\n"
        "  'dtensor': 'torch.distributed.tensor' in new,\n"
        "  'heavy': sorted({m.split('.')[0] for m in new} & {'rich', 'matplotlib', 'safetensors', 'numpy'})}))"
    )
    assert json.loads(out) == {
        "env": True,
        "threads": True,
        "cuda": False,
        "triton": False,
        "dtensor": False,
        "heavy": [],
    }


def test_works_without_triton() -> None:
    out = _run(
        HIDE_TRITON + "import torch, onepass\n"
        "x = torch.randn(4, 8, requires_grad=True)\n"
        "onepass.weighted_sum(x, torch.ones(8)).sum().backward()\n"
        "print(x.grad.sum().item(), 'triton' in sys.modules)"
    )
    assert out.split() == ["32.0", "False"]


def test_reached_from_the_package_alone() -> None:
    """In an interpreter of its own: another test's imports would hide what is missing."""
    names = {
        "nn": ["nn.Router"],
        "optim": ["optim.Lion", "optim.clip_grad_norm"],
        "compat": [
            "compat.cs336.WeightedSumFunc", "compat.triton_transformer.layernorm", "compat.colt5_attention.topk",
            "compat.lion_pytorch.Lion",
        ],
    }  # fmt: skip
    code = ["import sys, onepass"]
    for package, paths in names.items():
        code.append(f"print('onepass.{package}' in sys.modules, {package!r} in dir(onepass))")
        code += [f"print(onepass.{path}.__name__)" for path in paths]
    want = []
    for paths in names.values():
        want += ["False", "True", *(path.split(".")[-1] for path in paths)]
    assert _run("\n".join(code)).split() == want


def test_swap_is_imported_when_first_touched() -> None:
    out = _run(
        "import sys, onepass\n"
        "print('onepass.swapping' in sys.modules, 'onepass.nn' in sys.modules, 'swap' in dir(onepass))\n"
        "from onepass import SwapReport, swap\n"
        "print(swap is onepass.swap, SwapReport.__name__, 'transformers' in sys.modules)"
    )
    assert out.split() == ["False", "False", "True", "True", "SwapReport", "False"]


def test_compat_says_what_it_has() -> None:
    import onepass

    names = ["colt5_attention", "cs336", "lion_pytorch", "triton_transformer"]
    assert onepass.compat.__all__ == names
    assert set(names) <= set(dir(onepass.compat))
    assert not hasattr(onepass.compat, "bitsandbytes")
    with pytest.raises(AttributeError, match="'bitsandbytes'; it has colt5_attention, cs336, lion_pytorch"):
        _ = onepass.compat.bitsandbytes


@pytest.mark.slow
def test_adds_little_to_torch() -> None:
    """Processor time with bytecode at hand, as after an installation: 25 ms where torch itself takes 1.3 s."""
    code = (
        "import time; t = time.process_time(); import torch; u = time.process_time(); import onepass\n"
        "print(1000 * (time.process_time() - u), 1000 * (u - t))"
    )
    cached = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    _run(code, cached)
    times = [tuple(map(float, _run(code, cached).split())) for _ in range(3)]
    ours, theirs = min(t[0] for t in times), min(t[1] for t in times)
    assert ours < max(60, 0.04 * theirs), f"import onepass took {ours:.0f} ms beyond torch's {theirs:.0f}"

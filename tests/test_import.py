"""Promise 6: import is harmless. Each check runs in a fresh interpreter."""

from __future__ import annotations

import json
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


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_no_cuda_no_triton_no_environment_change() -> None:
    out = _run(
        "import json, os, sys, torch\n"
        "before = dict(os.environ); threads = torch.get_num_threads(); modules = set(sys.modules)\n"
        "import onepass\n"
        "new = set(sys.modules) - modules\n"
        "print(json.dumps({'env': before == dict(os.environ), 'threads': threads == torch.get_num_threads(),\n"
        "  'cuda': torch.cuda.is_initialized(), 'triton': any(m.split('.')[0] == 'triton' for m in new),\n"
        "  'heavy': sorted({m.split('.')[0] for m in new} & {'rich', 'matplotlib', 'safetensors', 'numpy'})}))"
    )
    assert json.loads(out) == {"env": True, "threads": True, "cuda": False, "triton": False, "heavy": []}


def test_works_without_triton() -> None:
    out = _run(
        HIDE_TRITON + "import torch, onepass\n"
        "x = torch.randn(4, 8, requires_grad=True)\n"
        "onepass.weighted_sum(x, torch.ones(8)).sum().backward()\n"
        "print(x.grad.sum().item(), 'triton' in sys.modules)"
    )
    assert out.split() == ["32.0", "False"]


def test_submodules_without_importing_them() -> None:
    out = _run(
        "import onepass, sys; print('onepass.nn' in sys.modules, onepass.nn.Router.__name__, 'optim' in dir(onepass))"
    )
    assert out.split() == ["False", "Router", "True"]


@pytest.mark.slow
def test_adds_less_than_60_ms_to_torch() -> None:
    """Processor time, the least of several tries: the machine may be busy with other tests."""
    code = "import time, torch; t = time.process_time(); import onepass; print(1000 * (time.process_time() - t))"
    times = [float(_run(code)) for _ in range(5)]
    assert min(times) < 60, f"import onepass took {min(times):.0f} ms beyond torch"

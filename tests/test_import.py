"""Promise 6: import is harmless. Each check runs in a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def _run(code: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


REACHED = """
import json, os, sys, torch, warnings
warnings.simplefilter("error")  # torch's own while it is imported are not ours
before, threads, modules = dict(os.environ), torch.get_num_threads(), set(sys.modules)
import onepass

rooms = ["nn", "optim", "compat", "swap"]
late = [room for room in rooms if f"onepass.{room}" in sys.modules or room not in dir(onepass)]
late += ["swapping"] if "onepass.swapping" in sys.modules else []
names = [onepass.nn.Router.__name__]
new = set(sys.modules) - modules
tops = {module.split(".")[0] for module in new}
found = {
    "not late": late,
    "env": before == dict(os.environ),
    "threads": threads == torch.get_num_threads(),
    "cuda": torch.cuda.is_initialized(),
    "dtensor": "torch.distributed.tensor" in new,
    "heavy": sorted(tops & {"triton", "rich", "matplotlib", "safetensors", "numpy"}),
}
from onepass import SwapReport, swap
compat = onepass.compat
for thing in (onepass.optim.Lion, onepass.optim.clip_grad_norm, compat.cs336.WeightedSumFunc, SwapReport,
              compat.triton_transformer.layernorm, compat.colt5_attention.topk, compat.lion_pytorch.Lion):
    names.append(thing.__name__)
from onepass import nn, optim
x, scores = torch.randn(2, 64, 32, requires_grad=True), torch.randn(2, 64, requires_grad=True)
y, s = onepass.layer_norm(onepass.rms_norm(x, torch.ones(32)), residual=x)
onepass.weighted_sum(y, torch.ones(32)).sum().backward()
(onepass.soft_topk(scores, 4).square().sum() + onepass.topk(scores, 4).gates.sum()).backward()
onepass.coor_descent(scores, n_iters=4, k=4).square().sum().backward()
model = torch.nn.Sequential(nn.RoutedBlock(32, k=1 / 8, heads=2, dim_head=16), torch.nn.LayerNorm(32))
swap(model)
optimizer = optim.Lion(model.parameters())
model(x).square().mean().backward()
optimizer.step()
print(json.dumps(found | {"names": names, "swap": swap is onepass.swap, "others": "transformers" in sys.modules}))
"""


def test_rooms_are_imported_when_first_touched_and_nothing_else_is() -> None:
    """Nor does an import or a first call warn."""
    assert json.loads(_run(REACHED)) == {
        "not late": [], "env": True, "threads": True, "cuda": False, "dtensor": False, "heavy": [],
        "names": ["Router", "Lion", "clip_grad_norm", "WeightedSumFunc", "SwapReport", "layernorm", "topk", "Lion"],
        "swap": True, "others": False,
    }  # fmt: skip


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

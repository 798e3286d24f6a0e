"""Import is harmless, torch alone is enough, commands name the extra that they need; help and errors say what to do."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import onepass
from onepass.__main__ import main
from onepass.doctor import facts
from onepass.train.commands.options import EXTRAS


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
    "heavy": sorted(tops & {"triton", "matplotlib", "safetensors", "numpy"}),
}
# a recorded call loads no compiler: it takes 2 to 4 s, of a program that may never compile anything
from onepass.core.launch import replay
with replay._Recorder((torch.ones(3),)):
    torch.empty(3)
found["compiler"] = "torch._dynamo" in sys.modules
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
        "compiler": False,
        "names": ["Router", "Lion", "clip_grad_norm", "WeightedSumFunc", "SwapReport", "layernorm", "topk", "Lion"],
        "swap": True, "others": False,
    }  # fmt: skip


def test_compat_says_what_it_has() -> None:
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


PYPROJECT = (Path(__file__).parents[1] / "pyproject.toml").read_text()
# None in sys.modules: importing the name raises, and looking for it finds nothing
TORCH_ALONE = """
import sys
for name in ("matplotlib", "numpy", "safetensors", "triton"):
    sys.modules[name] = None
"""
# what the built wheel does as well, where nothing else is installed (packages.py)
LIBRARY = """
import onepass, torch
from onepass import compat, nn, optim
import onepass.compat.colt5_attention, onepass.compat.cs336
import onepass.compat.lion_pytorch, onepass.compat.triton_transformer

block = nn.RoutedBlock(32, k=1 / 16, heads=2, dim_head=16)
optimizer = optim.Lion(block.parameters())
block(torch.randn(2, 64, 32)).square().sum().backward()
optimizer.step()
print("used", onepass.__version__, onepass.__file__)
"""
COMMANDS = (["train"], ["show", "run", "file"], ["generate", "run", "--prompt", "a"])


def _requirements(key: str) -> list[str]:
    """Names in the list that pyproject.toml holds under a key."""
    (found,) = re.findall(rf"^{key} = \[(.*?)\]$", PYPROJECT, re.MULTILINE | re.DOTALL)
    return re.findall(r'"([\w-]+)', found)


def test_torch_alone() -> None:
    # the import may make torch warn that there is no NumPy; what the commands say follows after the mark
    code = f"""
from onepass.__main__ import main
print(main(["doctor"]))
print("mark", file=sys.stderr)
sys.exit(sum(main(command) for command in {COMMANDS}))
"""
    done = subprocess.run(
        [sys.executable, "-c", TORCH_ALONE + LIBRARY + code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 * len(COMMANDS), done.stderr
    assert done.stdout.startswith("used ")
    assert "all is well" in done.stdout
    assert done.stdout.endswith("\n0\n")
    needs = "needs matplotlib, numpy, safetensors: pip install 'onepass[train]'\n"
    assert done.stderr.partition("mark\n")[2] == "".join(f"onepass {command[0]}: {needs}" for command in COMMANDS)


def test_extras_are_those_of_the_package() -> None:
    assert _requirements("dependencies") == ["torch"]
    assert {extra: tuple(_requirements(extra)) for extra in EXTRAS} == EXTRAS


def test_doctor_asks_for_the_torch_that_the_package_requires() -> None:
    least = ".".join(map(str, facts.LEAST["torch"]))
    assert f'dependencies = ["torch>={least}"]' in PYPROJECT


@pytest.mark.parametrize("command", [[], ["doctor"], ["train"], ["show"], ["generate"]])
def test_every_help_has_examples(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    examples = capsys.readouterr().out.partition("\nexamples:\n")[2]
    assert "onepass " + " ".join(command) in examples


def test_doctor_names_an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ((7, 5), (9, 0))[index])
    monkeypatch.setattr(torch.version, "hip", None)
    (line,) = facts.advice({"triton": "3.6"})
    assert line.startswith("cuda:0 has compute capability 7.5: the kernels are written for 8.0 and newer")
    assert "ONEPASS_BACKEND=torch" in line


@pytest.mark.parametrize(("name", "room"), [("RMSNorm", "nn"), ("Lion", "optim"), ("layernorm", ""), ("__x__", "")])
def test_a_name_of_another_room_gets_a_hint(name: str, room: str) -> None:
    with pytest.raises(AttributeError) as error:
        getattr(onepass, name)
    hint = f"; it is onepass.{room}.{name}" if room else ""
    assert str(error.value) == f"module 'onepass' has no attribute {name!r}{hint}"


@pytest.mark.parametrize("run", [["onepass", "doctor"], ["-m", "onepass"], ["-c", "import onepass"]])
def test_ctrl_c_while_torch_loads(run: list[str], tmp_path: Path) -> None:
    """The command ends in one line, as later; a program gets its exception."""
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    (tmp_path / "onepass").write_text("from onepass.__main__ import main\nmain()\n")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(onepass.__file__).parents[1]}"}
    # of what a shell started in the background Ctrl-C is ignored, and of its children
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    done = subprocess.run([sys.executable, *run], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    signal.signal(signal.SIGINT, before)
    if run[0] == "-c":
        assert "KeyboardInterrupt" in done.stderr
    else:
        assert (done.returncode, done.stderr) == (130, "onepass: interrupted\n")

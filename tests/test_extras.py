"""torch alone is enough for the library and for `doctor`; other commands name the extra that they need."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from onepass.doctor.facts import LEAST
from onepass.train.commands.extras import EXTRAS

PYPROJECT = (Path(__file__).parents[1] / "pyproject.toml").read_text()
# None in sys.modules: importing the name raises, and looking for it finds nothing
TORCH_ALONE = """
import sys
for name in ("matplotlib", "numpy", "rich", "safetensors", "triton"):
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
    needs = "needs matplotlib, numpy, rich, safetensors: pip install 'onepass[train]'\n"
    assert done.stderr.partition("mark\n")[2] == "".join(f"onepass {command[0]}: {needs}" for command in COMMANDS)


def test_extras_are_those_of_the_package() -> None:
    assert _requirements("dependencies") == ["torch"]
    assert {extra: tuple(_requirements(extra)) for extra in EXTRAS} == EXTRAS


def test_doctor_asks_for_the_torch_that_the_package_requires() -> None:
    least = ".".join(map(str, LEAST["torch"]))
    assert f'dependencies = ["torch>={least}"]' in PYPROJECT

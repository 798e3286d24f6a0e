"""torch alone is enough for the library and for `doctor`; other commands name the extra that they need."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from onepass.core.extras import EXTRAS
from onepass.doctor.facts import LEAST

PYPROJECT = (Path(__file__).parents[1] / "pyproject.toml").read_text()
# None in sys.modules: importing the name raises, and looking for it finds nothing
TORCH_ALONE = "import sys\nfor name in ('matplotlib', 'numpy', 'rich', 'safetensors'): sys.modules[name] = None\n"
LIBRARY = """
import onepass, torch
from onepass import compat, nn, optim
import onepass.compat.colt5_attention, onepass.compat.cs336
import onepass.compat.lion_pytorch, onepass.compat.triton_transformer

block = nn.RoutedBlock(32, k=1 / 16, heads=2, dim_head=16)
optimizer = optim.Lion(block.parameters())
block(torch.randn(2, 64, 32)).square().sum().backward()
optimizer.step()
print("used")
"""


def _requirements(key: str) -> list[str]:
    """Names in the list that pyproject.toml holds under a key."""
    (found,) = re.findall(rf"^{key} = \[(.*?)\]$", PYPROJECT, re.MULTILINE | re.DOTALL)
    return re.findall(r'"([\w-]+)', found)


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", TORCH_ALONE + code], capture_output=True, text=True, check=False)


def test_library_with_torch_alone() -> None:
    done = _run(LIBRARY)
    assert (done.stdout, done.returncode) == ("used\n", 0), done.stderr


def test_doctor_with_torch_alone() -> None:
    done = _run("from onepass.__main__ import main; sys.exit(main(['doctor']))")
    assert done.returncode == 0, done.stderr
    assert "all is well" in done.stdout


def test_a_command_names_its_extra() -> None:
    commands = ["train"], ["show", "run", "file"], ["generate", "run", "--prompt", "a"]
    # the import may make torch warn that there is no NumPy; what the commands say follows after the mark
    code = "from onepass.__main__ import main; print('mark', file=sys.stderr)\n"
    done = _run(code + f"sys.exit(sum(main(command) for command in {commands}))")
    assert (done.returncode, done.stdout) == (2 * len(commands), "")
    needs = "needs matplotlib, numpy, rich, safetensors: pip install 'onepass[train]'\n"
    assert done.stderr.partition("mark\n")[2] == "".join(f"onepass {command[0]}: {needs}" for command in commands)


def test_extras_are_those_of_the_package() -> None:
    assert _requirements("dependencies") == ["torch"]
    assert {extra: tuple(_requirements(extra)) for extra in EXTRAS} == EXTRAS


def test_doctor_asks_for_the_torch_that_the_package_requires() -> None:
    least = ".".join(map(str, LEAST["torch"]))
    assert f'dependencies = ["torch>={least}"]' in PYPROJECT

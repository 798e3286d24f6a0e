"""`make dist`: build sdist and wheel, check what is in them, and use the wheel where only torch is installed.

The clean environment links torch and what torch requires from the one that runs this, which spares a second download.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

from test_import import LIBRARY

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
IN_SDIST = ["pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "src/onepass/py.typed", "tests/conftest.py"]
NOT_IN_WHEEL = re.compile(r"^(?!onepass/|onepass-[^/]+\.dist-info/)|results/|(^|/)test_|\.png$")


def build() -> tuple[Path, Path]:
    """Return sdist and wheel, freshly built; the wheel comes from the sdist, as an index's users get it."""
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", DIST, ROOT], check=True, stdout=subprocess.DEVNULL)
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", sdist, wheel], check=True)
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """Stop where a file is missing or too many."""
    with tarfile.open(sdist) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    if missing := [name for name in IN_SDIST if name not in found]:
        sys.exit(f"{sdist.name} has no {', '.join(missing)}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode()
    if "onepass/py.typed" not in names or not any(name.endswith("licenses/LICENSE") for name in names):
        sys.exit(f"{wheel.name} lacks py.typed or its licence")
    if extra := [name for name in names if NOT_IN_WHEEL.search(name)]:
        sys.exit(f"{wheel.name} should not hold {', '.join(extra)}")
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    if [re.split(r"[^\w-]", line.removeprefix("Requires-Dist: "))[0] for line in required] != ["torch"]:
        sys.exit(f"{wheel.name} requires more than torch: {required}")


def fresh(directory: Path, *names: str) -> Path:
    """Make an environment with these packages and their requirements, linked from this one; return where they are."""
    venv.create(directory, with_pip=False, symlinks=True)
    python = directory / "bin" / "python"
    paths = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    site, todo, done = Path(paths.strip()), list(names), set()
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        dist = importlib.metadata.distribution(name)
        for top in {Path(file).parts[0] for file in dist.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(dist.locate_file(top))).resolve())
        wanted = map(Requirement, dist.requires or ())
        todo += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return site


def use(wheel: Path, directory: Path) -> None:
    """Install the wheel beside torch alone; use modules, optimizer and doctor; see a command name its extra."""
    fresh(directory, "torch")
    python = directory / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel]
    subprocess.run(pip, check=True)

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=directory, text=True, capture_output=True, check=False)

    for module in ("numpy", "matplotlib", "safetensors"):
        if run(python, "-c", f"import {module}").returncode == 0:
            sys.exit(f"the environment that should have torch alone has {module}")
    used = run(python, "-c", LIBRARY)
    if used.returncode or str(directory) not in used.stdout:
        sys.exit(used.stdout + used.stderr)
    doctor = run(python, "-m", "onepass", "doctor")
    if doctor.returncode:
        sys.exit(doctor.stdout + doctor.stderr)
    train = run(directory / "bin" / "onepass", "train")
    if train.returncode != 2 or "pip install 'onepass[train]'" not in train.stderr.splitlines()[-1]:
        sys.exit(f"onepass train without its extra: code {train.returncode}\n{train.stderr}")
    print(f"{wheel.name}: used with torch alone; stderr of an import and a step: {used.stderr.strip() or 'none'}")


def main() -> None:
    """Build, look inside, use."""
    sdist, wheel = build()
    check_contents(sdist, wheel)
    with tempfile.TemporaryDirectory() as directory:
        use(wheel, Path(directory).resolve() / "clean")
    print(f"left in {DIST.name}/: {sdist.name}, {wheel.name}")


if __name__ == "__main__":
    main()

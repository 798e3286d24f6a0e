"""Assemble the repository of onepass's operators for the Hugging Face kernels hub.

    python hub/build.py [build/hub]

The result holds one folder per backend, ``build/torch-cpu`` and ``build/torch-cuda``, with the same Python files in
both: `hub/package`, and every file of `src/onepass` that it imports, directly or not. ``kernels`` loads a folder under
a name of its own, so imports become relative, and operators are registered under that name instead of ``onepass``: the
installed package and several versions of the kernel live in one process.
"""

# ruff: noqa: T201

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SRC, PACKAGE = ROOT / "src", ROOT / "hub" / "package"
# Triton compiles for the GPU at hand; 8.0 is the oldest capability that `onepass doctor` accepts
BACKENDS: dict[str, dict[str, object]] = {"cpu": {"type": "cpu"}, "cuda": {"type": "cuda", "archs": ["8.0+PTX"]}}


def absolute_imports(text: str) -> list[ast.ImportFrom]:
    """Return the imports from onepass in a file.

    Raises:
        ValueError: the file imports onepass in a form that can't be made relative.
    """
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import) and any(a.name.partition(".")[0] == "onepass" for a in node.names):
            raise ValueError(f"line {node.lineno}: write `from onepass... import ...`, which can be made relative")
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == "onepass":
            found.append(node)
    return found


def relative(text: str, depth: int) -> str:
    """Return the text of a file that lies `depth` folders inside the package, with relative imports."""
    lines = text.splitlines(keepends=True)
    for node in absolute_imports(text):
        dots = "." * (depth + 1)
        old, name = re.escape(str(node.module)), str(node.module).partition(".")[2]
        lines[node.lineno - 1] = re.sub(rf"\bfrom {old} import\b", f"from {dots}{name} import", lines[node.lineno - 1])
    changed = "".join(lines)
    if absolute_imports(changed):
        raise ValueError("an import from onepass stands on a line of another statement")
    return changed


def files_of(module: str) -> list[Path]:
    """Return the files that an import of the module reads: its own, and the ``__init__`` of each package around it."""
    parts = module.split(".")
    found = [SRC.joinpath(*parts[:i], "__init__.py") for i in range(2, len(parts) + 1)]
    return [path for path in (*found, SRC.joinpath(*parts).with_suffix(".py")) if path.is_file()]


def modules_in(path: Path, text: str) -> set[str]:
    """Return the modules of onepass that a file imports, wherever in it; a name may be a module too."""
    found = set()
    package = list(path.relative_to(SRC).parts[:-1]) if path.is_relative_to(SRC) else ["onepass"]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            if whole.partition(".")[0] == "onepass":
                found |= {whole, *(f"{whole}.{alias.name}" for alias in node.names)}
    return found


def sources() -> dict[str, str]:
    """Return the package's files with relative imports, by their path inside it."""
    found: dict[str, str] = {}
    waiting = [(path, path.name) for path in sorted(PACKAGE.glob("*.py"))]
    while waiting:
        path, inside = waiting.pop()
        if inside in found:
            continue
        text = path.read_text(encoding="utf-8")
        try:
            found[inside] = relative(text, inside.count("/"))
        except ValueError as e:
            raise ValueError(f"{path}: {e}") from e
        for module in modules_in(path, text):
            waiting += [(f, f.relative_to(SRC / "onepass").as_posix()) for f in files_of(module)]
    return dict(sorted(found.items()))


def facts() -> tuple[str, int]:
    """Return licence and major version of the project."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    version = (SRC / "onepass" / "__init__.py").read_text(encoding="utf-8")
    (licence,) = re.findall(r'^license = "(.+)"$', text, re.MULTILINE)
    (major,) = re.findall(r'^__version__ = "(\d+)\.', version, re.MULTILINE)
    return licence, int(major)


def write(out: Path) -> list[Path]:
    """Write the repository into `out`, which is emptied first; return the folders of its variants.

    Raises:
        ValueError: `out` has files and was not made by this program, or a file can't be made relative.
    """
    variants = {f"torch-{backend}" for backend in BACKENDS}
    others = {p.name for p in out.iterdir()} - {"build", "README.md", "LICENSE"} if out.exists() else set()
    if (out / "build").exists():
        others |= {f"build/{p.name}" for p in (out / "build").iterdir() if p.name not in variants}
    if others:
        raise ValueError(f"{out} has {min(others)}, which this program does not make; name another folder")
    found = sources()
    shutil.rmtree(out, ignore_errors=True)
    licence, version = facts()
    digest = hashlib.sha256("\0".join(part for pair in found.items() for part in pair).encode()).hexdigest()
    made = []
    for backend, described in BACKENDS.items():
        folder = out / "build" / f"torch-{backend}"
        for name, text in found.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        sums = {name: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for name, text in found.items()}
        metadata = {
            "name": "onepass",
            "id": f"_onepass_{backend}_{digest[:10]}",
            "version": version,
            "license": licence.lower(),
            "python-depends": [],
            "backend": described,
            "digest": {"algorithm": "sha256", "files": sums},
        }
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
        made.append(folder)
    shutil.copy(ROOT / "hub" / "card.md", out / "README.md")
    shutil.copy(ROOT / "LICENSE", out / "LICENSE")
    return made


def main() -> None:
    """Write the repository where the first argument says, build/hub by default."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "hub"
    try:
        made = write(out)
    except ValueError as e:
        print(f"hub: {e}", file=sys.stderr)
        sys.exit(2)
    for folder in made:
        print(f"{folder}: {sum(1 for _ in folder.rglob('*.py'))} files")


if __name__ == "__main__":
    main()

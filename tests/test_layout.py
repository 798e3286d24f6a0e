"""The house keeps its rules: who imports whom, how long a file may be, and how many lines a room may have."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
FILES = sorted((SRC / "onepass").rglob("*.py"))
# a room's places, the lines of Python it may have, and its target. The lines may only fall: whoever needs more takes
# them from another room in the same commit. CONTRIBUTING has the rule by which a second way of doing a thing stays
MOST_LINES: dict[str, tuple[str, int, int]] = {
    "core": ("src/onepass/core src/onepass/ops/_shared src/onepass/ops/__init__.py", 2485, 2250),
    "norms": ("src/onepass/ops/norm src/onepass/ops/qk_norm_rope src/onepass/ops/weighted_sum", 3515, 3250),
    "topk": ("src/onepass/ops/soft_topk src/onepass/ops/coor_descent src/onepass/ops/topk", 4253, 4300),
    "lion": ("src/onepass/ops/lion src/onepass/optim", 2501, 2550),
    "routing": ("src/onepass/ops/causal_choice src/onepass/ops/routing src/onepass/ops/span_attention", 2859, 2800),
    "experts": ("src/onepass/ops/experts src/onepass/nn/experts.py", 1695, 1000),
    "layers": ("src/onepass/fused src/onepass/nn", 6087, 5700),
    "others": ("src/onepass/swapping src/onepass/compat src/onepass/t*.py", 1144, 1150),
    "doctor": ("src/onepass/doctor", 446, 461),
    "train": ("src/onepass/train", 2864, 2900),
    "tests": ("tests", 18968, 19000),
    "measured": ("benchmarks research", 5831, 6000),
    "contrib": ("contrib", 1431, 1438),
    "examples": ("examples", 842, 900),
}


def _module(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


MODULES = {_module(path): path for path in FILES}


@functools.cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def _imports(path: Path) -> Iterator[str]:
    """Modules of onepass that a file imports, wherever in it, by full name."""
    package = _module(path).split(".") if path.stem == "__init__" else _module(path).split(".")[:-1]
    for node in _nodes(path):
        if isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            name = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                whole = f"{name}.{alias.name}"
                yield whole if whole in MODULES else name
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)


def _room(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[1:3] if parts[1:2] == ["ops"] else parts[1:2])


def test_lines_of_a_room() -> None:
    found: dict[Path, str] = {}
    for room, (places, *_) in MOST_LINES.items():
        for pattern in places.split():
            found = dict.fromkeys(SRC.parent.glob(pattern if ".py" in pattern else f"{pattern}/**/*.py"), room) | found
    assert [path for path in FILES if path not in found and path.parent != SRC / "onepass"] == []
    lines = Counter(dict.fromkeys(MOST_LINES, 0))
    for path, room in found.items():
        lines[room] += len(path.read_text(encoding="utf-8").splitlines())
    assert [f"{r}: {lines[r]} > {most}" for r, (_, most, _) in MOST_LINES.items() if lines[r] > most] == []


def test_no_circle_of_imports() -> None:
    """Imports inside functions and for type checkers count: whoever reads one file of a circle must read all."""
    graph = {name: {other for other in _imports(path) if other in MODULES} for name, path in MODULES.items()}
    order = TopologicalSorter(graph)
    try:
        order.prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' → '.join(reversed(error.args[1]))}")


def test_length() -> None:
    assert [p for p in FILES if len(p.read_text(encoding="utf-8").splitlines()) > 700] == []


def test_imports() -> None:
    """An operator imports another's op and definition. Only `fused` imports kernels. `core` imports no operator."""
    wrong = []
    for module, path in MODULES.items():
        own = _room(module)
        for name in _imports(path):
            other = _room(name)
            if not name.startswith("onepass.") or other == own:
                continue
            if own.startswith("core"):
                allowed = other.startswith("core")
            elif own.startswith("ops"):
                free = other.startswith(("core", "ops._shared")) or name == "onepass.ops"
                allowed = free or name.rpartition(".")[2] in ("op", "reference", "definition")
            else:
                allowed = own != "nn" or not ("kernels" in name or "torch_path" in name)
            wrong += [] if allowed else [f"{module} imports {name}"]
    assert wrong == []

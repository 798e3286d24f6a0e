"""The house keeps its rules: who imports whom, how long a file may be, and how many lines a room may have."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
FILES = sorted((SRC / "onepass").rglob("*.py"))
# lines of Python that a room may have: what grows beyond is an edit here, with its reason in the commit; what shrinks
# lowers the number. CONTRIBUTING has the rule by which a second way of doing a thing stays
MOST_LINES = {
    "src/onepass/core": 1719,
    "src/onepass/ops": 15936,
    "src/onepass/fused": 4039,
    "src/onepass/nn": 3817,
    "src/onepass/optim": 1469,
    "src/onepass/swapping": 802,
    "src/onepass/compat": 1288,
    "src/onepass/doctor": 496,
    "src/onepass/train": 3591,
    "tests": 25475,
    "benchmarks": 5567,
    "research": 2442,
    "examples": 868,
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


@pytest.mark.parametrize("room", MOST_LINES)
def test_lines_of_a_room(room: str) -> None:
    folder = SRC.parent / room
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))
    assert lines <= MOST_LINES[room], f"{room} has {lines} lines of Python, MOST_LINES allows {MOST_LINES[room]}"


def test_every_room_has_a_budget() -> None:
    rooms = {path.parent.name for path in (SRC / "onepass").glob("*/__init__.py")}
    assert {f"src/onepass/{room}" for room in rooms} <= MOST_LINES.keys()


def test_no_circle_of_imports() -> None:
    """Imports inside functions and for type checkers count: whoever reads one file of a circle must read all."""
    graph = {name: {other for other in _imports(path) if other in MODULES} for name, path in MODULES.items()}
    order = TopologicalSorter(graph)
    try:
        order.prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' → '.join(reversed(error.args[1]))}")


def test_length() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert [p for p, lines in lengths.items() if lines > (600 if p.name.startswith("kernels_") else 400)] == []


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
                allowed = free or name.rpartition(".")[2] in ("op", "reference")
            else:
                allowed = own != "nn" or not ("kernels" in name or "torch_path" in name)
            wrong += [] if allowed else [f"{module} imports {name}"]
    assert wrong == []

"""Kernels avoid what Triton 3.6, the oldest supported, can't compile: other tests may have a newer one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import onepass

KERNELS = sorted(Path(onepass.__file__).parent.rglob("kernels*.py"))


def faults(source: str) -> Iterator[str]:
    """Name what Triton 3.6 refuses in the jit functions of a source."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        if not any("jit" in ast.unparse(decorator) for decorator in function.decorator_list):
            continue
        # a call from another kernel hands on the default as it is, and Triton takes numbers, None and constexpr alone
        for default in function.args.defaults:
            if isinstance(default, ast.Constant) and isinstance(default.value, str):
                yield f"{function.name}: the default {default.value!r} must be tl.constexpr({default.value!r})"
        # the second turn of an unrolled loop would give the name another value
        for loop in ast.walk(function):
            if isinstance(loop, ast.For) and "static_range" in ast.unparse(loop.iter):
                for inner in ast.walk(loop):
                    if isinstance(inner, ast.AnnAssign) and "constexpr" in ast.unparse(inner.annotation):
                        yield f"{function.name}: {ast.unparse(inner.target)} is a constexpr in a static_range loop"


def test_kernels_compile_with_the_oldest_triton() -> None:
    assert KERNELS
    found = [f"{path.name}: {fault}" for path in KERNELS for fault in faults(path.read_text(encoding="utf-8"))]
    assert not found


def test_faults_are_found() -> None:
    text = """
@triton.jit
def one(x, POLICY: tl.constexpr = ""):
    for i in tl.static_range(4):
        N: tl.constexpr = i
"""
    assert len(list(faults(text))) == 2

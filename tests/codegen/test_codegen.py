"""The speed gate that needs no GPU: every kernel, compiled for every kind of GPU, within its budget.

Every declaration is compiled for sm_90. Those of one kernel then take turns among its other targets, so that each
kernel meets each of them; `ONEPASS_CODEGEN=all` compiles every declaration for every target.

`make codegen` compiles with the oldest Triton that is supported. Its language is the smallest: it refuses a str for a
default, or a constexpr that an unrolled loop names again. Budgets are judged with this one alone; another allocates
registers otherwise, so what it takes beyond a budget is a warning.

Triton's package carries cuobjdump: registers and local memory (spills) are read from the machine code. The width of
global loads is read from PTX, which fixes it (to disassemble takes as long as to compile).
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from codegen.kernel import Kernel, all_kernels, ast_source
from onepass.core.launch import INTERPRET

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(INTERPRET, reason="the interpreter compiles nothing"),
]

BUDGETS_OF = "3.6.0"
# budgets are read on sm_90; of 600 compilations for its neighbours eleven take up to 8 registers, or bytes, more
BEYOND_90 = 8
AMD = "gfx942"


def _others(kernel: Kernel) -> list[int | str]:
    return [arch for arch in (80, 100) if arch >= kernel.least_arch] + [AMD] * kernel.amd


def _cases() -> Iterator[Any]:
    """(kernel, target): sm_90 in every run, other targets in the slow one."""
    yield from (pytest.param(k, 90, id=f"{k.name}-sm_90") for k in all_kernels() if k.least_arch <= 90)
    every = os.environ.get("ONEPASS_CODEGEN") == "all"
    declared: dict[Any, list[Kernel]] = defaultdict(list)
    for kernel in all_kernels() if importlib.util.find_spec("triton") else ():
        declared[kernel.name if every else kernel.fn()].append(kernel)
    for kernels in declared.values():
        for i in range(max(len(kernels), *(len(_others(k)) for k in kernels))):
            kernel = kernels[i % len(kernels)]
            target = _others(kernel)[i % len(_others(kernel))]
            name = target if target == AMD else f"sm_{target}"
            yield pytest.param(kernel, target, id=f"{kernel.name}-{name}", marks=pytest.mark.slow)


def _compile(kernel: Kernel, target: Any) -> Any:
    import triton

    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages, "enable_fp_fusion": True}
    if kernel.maxnreg and target.backend == "cuda":
        options["maxnreg"] = kernel.maxnreg
    return triton.compile(ast_source(kernel), target=target, options=options)


def _tool(name: str, *args: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(tool), *args], capture_output=True, text=True, check=True).stdout


def _judge(within: bool, found: str) -> None:
    """Fail where the budgets' own Triton exceeds one; warn where another does."""
    import triton

    if str(triton.__version__) == BUDGETS_OF:
        assert within, found
    elif not within:
        warnings.warn(f"Triton {triton.__version__}: {found}", stacklevel=2)


def _usage(cubin: Path) -> tuple[int, int]:
    """(registers per thread, bytes of stack and local memory) as cuobjdump reports them."""
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", _tool("cuobjdump", "-res-usage", str(cubin)))
    assert found, "cuobjdump printed no resource usage"
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


@pytest.mark.parametrize(("kernel", "target"), list(_cases()))
def test_kernel(kernel: Kernel, target: int | str, tmp_path: Path) -> None:
    from triton.backends.compiler import GPUTarget

    if target == AMD:
        assembly = _compile(kernel, GPUTarget("hip", AMD, 64)).asm["amdgcn"]
        spills = re.search(r"\.vgpr_spill_count:\s+(\d+)", assembly)
        assert spills is not None
        _judge(int(spills[1]) <= kernel.max_amd_spills, f"{spills[1]} vector registers spilled")
        return
    compiled = _compile(kernel, GPUTarget("cuda", target, 32))
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    registers, spilled = _usage(cubin)
    more = 0 if target == 90 else BEYOND_90
    budget, local = kernel.max_registers + more, kernel.max_spill_bytes + more
    _judge(registers <= budget, f"{registers} registers, budget {budget}")
    _judge(spilled <= local, f"{spilled} bytes of local memory, budget {local}")
    if kernel.vector_loads:
        # plain loads of 4 × 4, 2 × 8 bytes or more; asynchronous copies of a pipelined loop
        loads = set(re.findall(r"\bld\.global[\w.:]*|\bcp\.async\.bulk|\bcp\.async\.c[ag][^;]*", compiled.asm["ptx"]))
        wide = [x for x in loads if re.search(r"v4\.\w(32|64)|v8\.\w32|v2\.\w64|bulk|, 0x10\b|, 16\b", x)]
        _judge(bool(wide), f"no 16-byte load; found {sorted(loads)}")


def test_the_makefile_brings_the_triton_of_the_budgets() -> None:
    assert f"'triton=={BUDGETS_OF}'" in (Path(__file__).parents[2] / "Makefile").read_text()


def test_every_folder_with_kernels_is_gated() -> None:
    """A kernel that no spec declares would escape the gate."""
    import onepass

    gated = {k.fn().fn.__module__.rpartition(".")[0] for k in all_kernels()}
    root = Path(onepass.__path__[0])
    found = {p.parent.relative_to(root.parent) for p in root.rglob("kernels*.py") if os.access(p, os.R_OK)}
    assert gated == {".".join(folder.parts) for folder in found}


def test_means_of_rows_are_rounded_to_nearest() -> None:
    """A constant divisor becomes a product with its reciprocal: in rows of one value an ulp of it would be left."""
    from triton.backends.compiler import GPUTarget

    (kernel,) = (k for k in all_kernels() if k.name == "norm forward bf16 N=768")
    assert "div.rn.f32" in _compile(kernel, GPUTarget("cuda", 90, 32)).asm["ptx"]

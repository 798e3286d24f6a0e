"""The speed gate that needs no GPU: what calls launch, compiled for every kind of GPU, within its budget.

Every launch of `calls.py` is compiled for sm_90. In the slow run each kernel meets the other targets, each with another
of its launches, as they are there. budgets.json holds what each took; `make codegen ARGS=--write` writes it anew.

`make codegen` compiles with the oldest Triton that is supported. Its language is the smallest: it refuses a str for a
default, or a constexpr that an unrolled loop names again. Budgets are judged with this one alone; another allocates
registers otherwise, so what it takes beyond a budget is a warning.

Triton's package carries cuobjdump: registers and local memory (spills) are read from the machine code. The width of
global loads is read from PTX, which fixes it (to disassemble takes as long as to compile).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import onepass
from codegen.conftest import read
from codegen.launched import GPUS, Launch, on
from onepass.core.launch import INTERPRET

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(INTERPRET, reason="the interpreter compiles nothing"),
]

BUDGETS_OF = "3.6.0"


@functools.cache
def _launches(target: str) -> dict[str, Launch]:
    """What the calls launch on a GPU, by call and kernel; each compilation once."""
    from codegen.calls import CALLS

    found: dict[Launch, tuple[str, Launch]] = {}
    with on(GPUS[target]) as launched:
        for name, call in CALLS:
            launched.clear()
            call()
            times = Counter[str]()
            for one in launched:
                times[one.name] += 1
                title = f"{name}: {one.name}{f' {n}' if (n := times[one.name]) > 1 else ''}"
                # sums of partials differ by their width
                found.setdefault(one._replace(constants=()) if "partials" in one.name else one, (title, one))
    return dict(found.values())


@functools.cache
def cases() -> dict[str, list[str]]:
    """Target → names of launches: all on sm_90, of each kernel another one on the others."""
    if INTERPRET or importlib.util.find_spec("triton") is None:
        return {}
    found = {target: list(_launches(target)) if target == "sm_90" else [] for target in GPUS}
    for turn, target in enumerate(list(GPUS)[1:]):
        seen: dict[Any, list[str]] = defaultdict(list)
        for name, one in _launches(target).items():
            seen[one.kernel].append(name)
        for names in seen.values():
            found[target].append(names[turn * len(names) // 3])
    return found


def _cases() -> list[Any]:
    return [
        pytest.param(target, name, id=f"{name}-{target}", marks=[pytest.mark.slow] if target != "sm_90" else [])
        for target, names in cases().items()
        for name in names
    ]


def _tool(name: str, *args: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(tool), *args], capture_output=True, text=True, check=True).stdout


def _widest(ptx: str) -> int:
    """Bytes of the widest plain load; asynchronous copies of a pipelined loop count as theirs."""
    widths = [16 for _ in re.findall(r"\bcp\.async\.bulk", ptx)]
    widths += [int(n, 0) for n in re.findall(r"\bcp\.async\.c[ag][^;]*?\], (0x[0-9a-f]+|\d+)", ptx)]
    for vector, bits in re.findall(r"\bld\.global[\w.:]*?(?:\.v(\d))?\.\w(\d+)\b", ptx):
        widths.append(int(vector or 1) * int(bits) // 8)
    return max(widths, default=0)


def _usage(one: Launch, target: str, folder: Path) -> list[int]:
    """Registers of a thread, bytes of its stack and local memory, of shared memory, and of the widest load."""
    from triton.backends.compiler import GPUTarget

    if GPUS[target].hip:
        compiled = one.compile(GPUTarget("hip", target, 64))
        spilled = re.search(r"\.vgpr_spill_count:\s+(\d+)", compiled.asm["amdgcn"])
        registers = re.search(r"\.vgpr_count:\s+(\d+)", compiled.asm["amdgcn"])
        assert spilled
        assert registers
        return [int(registers[1]), int(spilled[1]), compiled.metadata.shared, 0]
    compiled = one.compile(GPUTarget("cuda", int(target[3:]), 32))
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", _tool("cuobjdump", "-res-usage", str(cubin)))
    assert found, "cuobjdump printed no resource usage"
    registers, stack, local = map(int, found.groups())
    return [registers, stack + local, compiled.metadata.shared, _widest(compiled.asm["ptx"])]


def _beyond(usage: list[int], budget: list[int]) -> str:
    """What goes beyond a budget; multiprocessors hand out registers by eight."""
    registers, spilled, shared, widest = usage
    found = [f"{registers} registers, budget {budget[0]}"] if -(-registers // 8) > -(-budget[0] // 8) else []
    found += [f"{spilled} bytes of local memory, budget {budget[1]}"] if spilled > budget[1] else []
    found += [f"{shared} bytes of shared memory, budget {budget[2]}"] if shared > budget[2] else []
    found += [f"loads of {widest} bytes, budget {budget[3]}"] if widest < budget[3] else []
    return "; ".join(found)


@pytest.mark.parametrize(("target", "name"), _cases())
def test_kernel(target: str, name: str, tmp_path: Path, request: pytest.FixtureRequest, record_property: Any) -> None:
    import triton

    usage = _usage(_launches(target)[name], target, tmp_path)
    if request.config.getoption("--write", default=False):
        assert str(triton.__version__) == BUDGETS_OF
        record_property("usage", (target, name, usage))
        return
    budget = read().get(target, {}).get(name)
    assert budget is not None, "no budget: make codegen ARGS=--write, and ARGS='--write -m slow' for other targets"
    beyond = _beyond(usage, budget)
    if str(triton.__version__) == BUDGETS_OF:
        assert not beyond, beyond
    elif beyond:
        warnings.warn(f"Triton {triton.__version__}: {beyond}", stacklevel=1)


def test_every_budget_is_judged() -> None:
    assert {target: {*of} - {*cases()[target]} for target, of in read().items()} == {t: set() for t in GPUS}


def test_beyond_a_budget() -> None:
    assert not _beyond([64, 0, 1024, 16], [57, 0, 1024, 16])
    assert _beyond([65, 8, 1025, 8], [64, 0, 1024, 16]).count(";") == 3


def test_the_makefile_brings_the_triton_of_the_budgets() -> None:
    assert f"'triton=={BUDGETS_OF}'" in (Path(__file__).parents[2] / "Makefile").read_text()


def test_every_kernel_is_launched() -> None:
    """A kernel that no call launches would escape the gate."""
    names = [m.name for m in pkgutil.walk_packages(onepass.__path__, "onepass.") if ".kernels" in m.name]
    kernels = {
        f"{name}.{key}" for name in names for key, value in vars(importlib.import_module(name)).items()
        if key.endswith("_kernel") and hasattr(value, "arg_names") and value.fn.__module__ == name
    }  # fmt: skip
    assert kernels == {f"{one.kernel.fn.__module__}.{one.kernel.fn.__name__}" for one in _launches("sm_90").values()}


def test_means_of_rows_are_rounded_to_nearest() -> None:
    """A constant divisor becomes a product with its reciprocal: in rows of one value an ulp of it would be left."""
    from triton.backends.compiler import GPUTarget

    one = _launches("sm_90")["layer_norm bf16 768: forward"]
    assert "div.rn.f32" in one.compile(GPUTarget("cuda", 90, 32)).asm["ptx"]


def test_a_row_has_the_same_bits_in_every_lane_and_place() -> None:
    """The compiler contracts no product of a sum over lanes, in one of two ways: products are explicit, or it may not.

    Of two lanes that add what a shuffle brought to a bare product, one computes fma(x, w, x'·w' rounded), the other
    fma(x', w', x·w rounded): their copies of the sum differ, and what they store for the next step is a race. Two rows
    of a thread were contracted differently, so that the last bits depended on the place.
    """
    from triton.backends.compiler import GPUTarget

    forward = {name: one for name, one in _launches("sm_90").items() if name.endswith(": forward")}
    scores = [one for name, one in forward.items() if name.startswith("score ")]
    sums = [one for name, one in forward.items() if name.startswith("weighted_sum ")]
    assert [dict(one.options)["enable_fp_fusion"] for one in scores] == [False] * len(scores) != []
    assert len(sums) > 10
    with on(GPUS["sm_90"]) as launched:
        # one column, an odd width, rows that start off 16 bytes
        for x in (torch.empty(37, 1, device="meta"), torch.empty(37, 7, device="meta"),
                  torch.empty(4097, device="meta")[1:].view(64, 64)):  # fmt: skip
            for vectors in (1, 4):
                onepass.weighted_sum(x, torch.empty(vectors, x.shape[1], device="meta"))
    for one in (*sums, *launched):
        assert "mul.f32" not in one.compile(GPUTarget("cuda", 90, 32)).asm["ptx"]

"""Every kernel in the language of the oldest Triton that is supported: `make oldest` puts it before the installed one.

What a newer Triton compiles, 3.6 may refuse: a str as a default, or a constexpr that an unrolled loop names again.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from kernel_sources import ast_source
from onepass.core.launch import INTERPRET
from onepass.core.spec import Kernel, all_kernels

OLDEST = "3.6."
ARCH = 90


def _is_oldest() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return str(triton.__version__).startswith(OLDEST)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _is_oldest(), reason="`make oldest` brings the oldest Triton"),
    pytest.mark.skipif(INTERPRET, reason="the interpreter compiles nothing"),
]


@pytest.mark.parametrize("kernel", [pytest.param(k, id=k.name) for k in all_kernels() if k.least_arch <= ARCH])
def test_lowers(kernel: Kernel) -> None:
    """As far as Triton's own language goes; its compiler behind that is `test_codegen.py`'s."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    target = GPUTarget("cuda", ARCH, 32)
    backend = make_backend(target)
    options: Any = backend.parse_options({"num_warps": kernel.num_warps, "num_stages": kernel.num_stages})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    assert ast_source(kernel).make_ir(target, options, functions, modules, context).verify()

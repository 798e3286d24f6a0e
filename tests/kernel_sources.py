"""A kernel of some operator's spec as Triton's compiler takes it."""

from __future__ import annotations

from typing import Any

from onepass.core.spec import Kernel


def ast_source(kernel: Kernel) -> Any:
    """Return the kernel with the signature, constants and divisible arguments that its spec names."""
    from triton.compiler import ASTSource

    fn = kernel.fn()
    constexprs = {(fn.arg_names.index(k),): v for k, v in kernel.constexprs.items()}
    signature = {n: kernel.signature.get(n, "constexpr") for n in fn.arg_names}
    missing = [n for n in fn.arg_names if n not in kernel.signature and n not in kernel.constexprs]
    assert not missing, f"the spec of {kernel.name} says nothing about {missing}"
    attrs = {(fn.arg_names.index(n),): [["tt.divisibility", 16]] for n in kernel.divisible if n in kernel.signature}
    return ASTSource(fn=fn, signature=signature, constexprs=constexprs, attrs=attrs)

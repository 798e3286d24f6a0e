"""What a call launches on an H200, found without one: tensors on "meta" that say they are on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from onepass.core.launch import compiled


class Gpu(NamedTuple):
    """What launches ask of a GPU: multiprocessors, shared memory of a program, capability, and whether it is AMD's."""

    multiprocessors: int
    shared: int
    capability: tuple[int, int]
    hip: str | None = None


GPUS = {
    "sm_90": Gpu(132, 232448, (9, 0)), "sm_80": Gpu(108, 166912, (8, 0)), "sm_100": Gpu(148, 232448, (10, 0)),
    "gfx942": Gpu(304, 65536, (9, 4), "7.0"),
}  # fmt: skip
_TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8", torch.uint8: "*u8", torch.bool: "*i1", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


class Launch(NamedTuple):
    """A kernel with what decides its compilation: types or constants of its arguments by name, and options."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """The kernel's name, without what all names end with."""
        return str(self.kernel.fn.__name__).removesuffix("_kernel")

    def compile(self, target: Any) -> Any:
        """Compile it as a launch would."""
        import triton
        from triton.compiler import ASTSource

        at = self.kernel.arg_names.index
        constants = {(at(name),): value for name, value in self.constants}
        attributes = {(at(name),): [["tt.divisibility", 16]] for name in self.divisible}
        source = ASTSource(
            fn=self.kernel, constexprs=constants, attrs=attributes,
            signature={name: dict(self.signature).get(name, "constexpr") for name in self.kernel.arg_names},
        )  # fmt: skip
        return triton.compile(source, target=target, options=dict(self.options))


def _launch(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Launch:
    """Specialize on the arguments as Triton's launch does."""
    signature, constants, divisible = [], [], []
    for parameter, value in zip(kernel.params, args, strict=True):
        name = parameter.name
        free = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (free and isinstance(value, int) and value == 1):
            constants.append((name, value))
            continue
        of_tensor = isinstance(value, Tensor)
        address = value.data_ptr() if of_tensor else value
        if (free or of_tensor) and isinstance(address, int) and address % 16 == 0:
            divisible.append(name)
        signature.append((name, _TYPES[value.dtype] if of_tensor else "fp32" if isinstance(value, float) else "i32"))
    chosen = compiled.OPTIONS | options
    return Launch(kernel, *map(tuple, (signature, constants, divisible)), tuple(sorted(chosen.items())))  # type: ignore[arg-type]


@contextmanager
def on(gpu: Gpu) -> Iterator[list[Launch]]:
    """Let tensors on "meta" be those of a GPU, and collect what is launched, in order; nothing runs."""
    found: list[Launch] = []

    def launch(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        found.append(_launch(kernel, args, options))
        if compiled._recording.listener is not None:
            compiled._recording.listener.refuse()

    properties = SimpleNamespace(multi_processor_count=gpu.multiprocessors, shared_memory_per_block_optin=gpu.shared)
    fakes: dict[str, Callable[..., Any]] = {
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: gpu.capability,
        "current_device": lambda: None,
        "is_current_stream_capturing": lambda: False,
    }
    _forget()
    with (
        mock.patch.multiple(torch.cuda, **fakes),
        mock.patch.object(torch.version, "hip", gpu.hip),
        mock.patch("onepass.ops.lion.kernels.PTX", gpu.hip is None),
        mock.patch("onepass.ops.soft_topk.definition.solve", lambda s, *_: (s[:, :1],) * 2),  # seconds, and no launch
        mock.patch.object(torch.Tensor, "is_cuda", property(lambda t: t.device.type == "meta"), create=True),
        mock.patch.object(torch.Tensor, "is_meta", property(lambda t: False), create=True),
        mock.patch.object(compiled, "launch_specialized", launch),
        mock.patch.object(compiled, "_remember"),
        in_bf16(False),
    ):
        yield found
    _forget()


def _forget() -> None:
    """Clear what the package remembers of a device."""
    for name, module in list(sys.modules.items()):
        for value in vars(module).values() if name.startswith("onepass.") else ():
            getattr(value, "cache_clear", lambda: None)()


@contextmanager
def in_bf16(enabled: bool = True) -> Iterator[None]:
    """Let layers on "meta", which has no autocast, take it to be on or off."""
    of_others = torch.is_autocast_enabled

    def is_enabled(device: str = "cpu") -> bool:
        return enabled if device == "meta" else of_others(device)

    with (
        mock.patch.object(torch, "is_autocast_enabled", is_enabled),
        mock.patch.object(torch, "get_autocast_dtype", return_value=torch.bfloat16),
    ):
        yield

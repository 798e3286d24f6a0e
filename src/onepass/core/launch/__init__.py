"""Launch Triton kernels with little host time: which path a tensor takes, compiled kernels, recording and replay."""

from .backend import INTERPRET, import_later, path, uses_triton
from .compiled import launch
from .geometry import aligned, as_rows, cdiv, even_rows, gpu, next_power_of_2, sm_count
from .replay import replayed

__all__ = [
    "INTERPRET", "aligned", "as_rows", "cdiv", "even_rows", "gpu", "import_later", "launch", "next_power_of_2", "path",
    "replayed", "sm_count", "uses_triton",
]  # fmt: skip

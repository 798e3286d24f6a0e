"""Keep the garbage collector out of measurements and of the capture of CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Switch automatic collections off until the end of the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def collected() -> Iterator[None]:
    """Collect garbage, and then none until the end of the block, which captures a CUDA graph.

    A captured step is often part of a reference cycle, so its graph lives until a collection. A collection during
    another graph's capture would free it there, which CUDA refuses: that capture fails. torch collects before a capture
    only where `torch.compiler.config.force_cudagraph_gc` is set.
    """
    gc.collect()
    with no_collection():
        yield

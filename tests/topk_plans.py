"""Launch shapes of topk with which small rows take the ways of large ones."""

from __future__ import annotations

from typing import Any

import pytest

from onepass.ops.topk import plan


def shrink(monkeypatch: pytest.MonkeyPatch, **sizes: Any) -> None:
    """Let small rows take the ways of large ones."""
    small = {
        "NARROW": 0, "NARROW_TILE": 64, "WIDE": 1 << 40, "WIDE_CHUNK": 128, "WIDE_AGAIN": 512,
        "MAX_COLS": 16, "MAX_BYTES_OF_MANY": 16, "SCAN": 16, "TILE": 32, "TILE_WARPS": 1, "SAMPLE": 32, "SECTOR": 16,
        "SIGMAS": 1.0, "ALONE": 32, "MAX_SORTED": 64, **sizes,
    }  # fmt: skip
    for name, value in small.items():
        monkeypatch.setattr(plan, name, value)

"""What the contract's tests share."""

from __future__ import annotations

import pytest

from onepass.ops.norm import op


@pytest.fixture(autouse=True)
def _kernels_in_compiled_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract is about our operators; that compiled norms are torch's by default is tested with the norms."""
    monkeypatch.setattr(op, "COMPILED", "kernels")

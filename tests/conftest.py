"""Which tests run where: `gpu` needs CUDA, `interpret` needs TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if "interpret" in item.keywords and not INTERPRET:
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

"""Which tests `make quick` runs for which files."""

from __future__ import annotations

import pytest

from changed import chosen


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        (["src/onepass/ops/norm/op.py"], ["tests/contract", "tests/ops/norm"]),
        (["src/onepass/nn/norm.py"], ["tests/nn"]),
        (["src/onepass/train/loop.py"], ["tests/cli", "tests/train"]),
        (["src/onepass/core/launch.py"], ["tests/contract", "tests/core", "tests/test_import.py"]),
        (["src/onepass/__main__.py"], ["tests/contract", "tests/core", "tests/test_import.py"]),
        (["tests/nn/test_norm.py", "src/onepass/nn/norm.py"], ["tests/nn"]),
        (["tests/nn/test_norm.py"], ["tests/nn/test_norm.py"]),
        (["tests/nn/attention_oracle.py"], ["tests/nn"]),
        (["tests/test_that_was_removed.py", "docs/stability.md"], []),
        (["benchmarks/run.py", "research/ablate/text.py"], ["tests/benchmarks", "tests/research"]),
        (["fuzz/files.py"], ["tests/test_fuzz.py"]),
        (["README.md"], ["tests/test_readme.py"]),
    ],
)
def test_chosen(changed: list[str], tests: list[str]) -> None:
    assert chosen(changed) == tests

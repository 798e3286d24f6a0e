"""Which tests `make quick` runs for which files."""

from __future__ import annotations

import pytest

from changed import chosen, options
from conftest import concerns


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        (["src/onepass/nn/norm.py"], ["tests/nn"]),
        (["src/onepass/train/loop.py"], ["tests/train"]),
        (["src/onepass/core/launch.py"], ["tests/contract", "tests/core", "tests/test_import.py"]),
        (["src/onepass/__main__.py"], ["tests/contract", "tests/core", "tests/test_import.py"]),
        (["tests/nn/test_norm.py", "src/onepass/nn/norm.py"], ["tests/nn"]),
        (["tests/nn/test_norm.py"], ["tests/nn/test_norm.py"]),
        (["tests/nn/layers.py"], ["tests/nn"]),
        (["tests/test_that_was_removed.py", "LICENSE"], []),
        (["docs/reliability.md", "src/onepass/ops/norm/README.md"], ["tests/test_docs.py", "tests/test_readme.py"]),
        (["examples/fsdp2.py"], ["tests/test_examples.py"]),
        (["examples/sparse_attention.py"], ["tests/test_examples.py", "tests/test_sparse_attention.py"]),
        (["Makefile", ".github/workflows/test.yml"], ["tests/test_project_files.py"]),
        (["benchmarks/ab.py", "research/budget/text.py"], ["tests/benchmarks", "tests/research"]),
        (["README.md"], ["tests/test_readme.py"]),
        (["src/onepass/ops/norm/op.py"], ["tests/contract", "tests/ops/norm", "tests/sharded"]),
        (["src/onepass/core/sharding.py"], ["tests/contract", "tests/core", "tests/sharded", "tests/test_import.py"]),
    ],
)
def test_chosen(changed: list[str], tests: list[str]) -> None:
    assert chosen(changed) == tests


def test_contract_tests_of_the_operators_that_changed() -> None:
    norm, router = "src/onepass/ops/norm/op.py", "src/onepass/nn/router.py"
    assert options([norm, router]) == ["--operators=norm"]
    assert options([norm, "src/onepass/ops/topk/op.py"]) == ["--operators=norm,topk"]
    for all_of_them in (
        "src/onepass/core/bind.py",
        "src/onepass/ops/_shared/arguments.py",
        "tests/contract/test_bits.py",
    ):
        assert options([norm, all_of_them]) == []
    assert options([router]) == []


@pytest.mark.parametrize(
    ("test", "kept"),
    [
        ("test_values.py::test_it[topk-rows]", True),
        ("test_values.py::test_it[soft_topk-rows]", False),
        ("test_bits.py::test_threads", True),
        ("test_bits.py::test_placement[topk]", True),
    ],
)
def test_operators_by_their_ids(test: str, kept: bool) -> None:
    assert concerns(test, {"topk"}) == kept

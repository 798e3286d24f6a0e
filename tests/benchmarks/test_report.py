from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench.records import read
from benchmarks.report import build, page, table
from onepass.train.commands.errors import UserError

HEADER = {
    "header": True, "gpu": "NVIDIA H200", "copy_gbps": 4274.0, "torch": "2.11.0", "triton": "3.6.0",
    "onepass": "0.1.0", "rivals": {"liger-kernel": "0.8.5"}, "complete": True,
}  # fmt: skip


def record(impl: str, us: float, cols: int = 128, stage: str = "forward", dtype: str = "bfloat16") -> dict[str, Any]:
    return {
        "op": "layer_norm", "pass": stage, "case": {"rows": 8, "cols": cols}, "dtype": dtype, "impl": impl,
        "us": us, "gbps": 1.0, "copy_pct": 100 * 30 / us, "host_us": 5.0,
    }  # fmt: skip


RECORDS = [
    record("liger", 60.0), record("onepass", 30.0), record("onepass", 50.0, 256), record("liger", 40.0, 256),
    record("onepass", 33.0, 256, "backward"), record("only once", 90.0, 256),
]  # fmt: skip


def test_table() -> None:
    assert table(RECORDS) == (
        "| layer_norm forward, bfloat16 | onepass | liger | only once | × fastest rival |\n"
        "|---|---|---|---|---|\n"
        "| 8x128 | **30 (100%)** | 60 (50%) | – | 2.00× |\n"
        "| 8x256 | 50 (60%) | **40 (75%)** | 90 (33%) | 0.80× |\n"
        "\n"
        "| layer_norm backward, bfloat16 | onepass | × fastest rival |\n"
        "|---|---|---|\n"
        "| 8x256 | **33 (91%)** | – |\n"
    )


def test_memory_and_host_time_have_tables() -> None:
    more = {**record("onepass", 30.0), "peak_mib": 12.5, "kept_mib": 4.0, "host_us": None}
    text = page(HEADER, [more, record("liger", 60.0)])
    assert "## Memory" in text
    assert "| 8x128 | 12.5 (4) | – |" in text
    assert "## Host time" in text
    assert "| 8x128 | – | 5 |" in text
    assert "## Memory" not in page(HEADER, RECORDS)


def test_what_went_wrong_is_told() -> None:
    told = {"op": "layer_norm", "pass": "forward", "case": {"rows": 8}, "dtype": "float32", "impl": "x", "note": "off"}
    text = page({**HEADER, "failed": [told]}, RECORDS)
    assert "## Failed\n- x at layer_norm forward 8 float32: off" in text
    assert "Disagreeing" not in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "is no JSON"),
        ("{}", "holds no benchmark results"),
        ("[]", "holds no benchmark results"),
        ('[{"op": "x"}]', "0 header records"),
        (json.dumps([HEADER, {"op": "x"}]), "a record lacks pass, case"),
        (json.dumps([HEADER]), "no measurements"),
    ],
)
def test_broken_files(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "norm.json").write_text(text)
    with pytest.raises(UserError, match=words):
        build(tmp_path)


COMMITTED = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*/*.json"))


@pytest.mark.parametrize("source", COMMITTED, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_committed_tables_are_those_of_the_committed_records(source: Path) -> None:
    """Only `*.json` with records of the bench stands beside tables: `--report` reads all of them."""
    header, records = read(source)
    text = source.with_suffix(".md")
    assert not text.exists() or page(header, records) == text.read_text()

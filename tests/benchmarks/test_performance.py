from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from benchmarks import performance
from benchmarks.__main__ import main
from benchmarks.bars import BARS, CPU_BARS, CPU_NORM_BARS, FIRST_STEP_BARS
from benchmarks.bench.records import read, write
from benchmarks.notes import NOTES
from onepass.train.commands.errors import UserError

PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "bars.md"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A copy of the records, to be changed; the ablation's many files are left out."""
    shutil.copytree(performance.RESULTS, tmp_path / "results", ignore=shutil.ignore_patterns("ablate*"))
    return tmp_path / "results"


def line(page: str, *words: str) -> list[str]:
    """The cells of the one table row that holds all these words."""
    (found,) = (x for x in page.splitlines() if x.startswith("|") and all(word in x for word in words))
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_the_committed_page_is_what_the_command_writes(tmp_path: Path) -> None:
    assert main(["--performance", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == PAGE.read_text()


def test_the_page_stays_short_and_its_links_lead_somewhere() -> None:
    text = PAGE.read_text()
    assert len(text.splitlines()) <= 140
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (PAGE.parent / target.partition("#")[0]).exists(), target


def test_every_bar_has_a_line() -> None:
    text = PAGE.read_text()
    for bar in (*BARS, *CPU_BARS, *CPU_NORM_BARS, *FIRST_STEP_BARS):
        told = f"| {bar.stage} | {bar.words} |", f"{bar.stage}, {bar.words}: "
        lines = [x for x in text.splitlines() if f"`{bar.op}`" in x]
        assert any(words in x for x in lines for words in told), performance.name(bar)


def test_notes_are_on_bars_that_exist() -> None:
    known = {performance.name(bar) for bar in (*BARS, *CPU_BARS, *CPU_NORM_BARS, *FIRST_STEP_BARS)}
    assert {name for names in NOTES.values() for name in names} <= known


def test_other_records_change_the_page(results: Path) -> None:
    """A bar that is missed, with its note, is met by better records and the note goes."""
    words = "`routed_block`", "memory of dense"
    before = performance.page(results)
    assert line(before, *words)[6].startswith("0 of 1 (")
    assert "cuBLAS workspaces" in before
    header, records = read(results / "h200" / "fused.json")
    for r in records:
        if r["op"] == "routed_block" and r["impl"] == "onepass":
            r["peak_mib"] = 1.0
    write(results / "h200" / "fused.json", [header, *records])
    after = performance.page(results)
    assert "forward+backward, d=1024, 2×32768, memory of dense: 0." in after
    assert "cuBLAS workspaces" not in after


def test_operators_that_share_a_bar_show_the_worse_of_them(results: Path) -> None:
    header, records = read(results / "h200" / "norm.json")
    for r in records:
        if (r["op"], r["pass"], r["impl"], r["case"]["cols"]) == ("rms_norm", "forward", "onepass", 32768):
            r["copy_pct"] = 84.5
    write(results / "h200" / "norm.json", [header, *records])
    cells = line(performance.page(results), "| 32768 wide |")
    assert cells[0] == "`layer_norm`, `rms_norm`"
    assert cells[3:5] == ["≥ 85 % of copy", "84.5 %"]
    assert cells[5].startswith("`rms_norm` 4096x32768")
    assert cells[6] == "2 of 4"


def test_what_was_not_measured_is_said(results: Path) -> None:
    (results / "h200" / "lion.json").unlink()
    assert line(performance.page(results), "`lion`", "gpt2-124m")[4] == "not in the records"


def test_no_records_at_all(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no results"):
        performance.page(tmp_path)

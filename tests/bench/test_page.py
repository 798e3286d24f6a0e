"""`onepass bench --html`: one page with every record, no script, nothing fetched."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bench.fakes import FakeTimer, fake_operator
from onepass.__main__ import main
from onepass.bench import page, timers
from onepass.bench.records import read

__all__ = ["fake_operator"]  # pytest finds the fixture under its name
RESULTS = Path(__file__).parents[2] / "benchmarks/results/h200"


class Checked(HTMLParser):
    """Collects tags and text; void elements aside, every tag must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not {name for name, _ in attrs} & {"src", "href", "onclick", "onload"}
        if tag not in ("meta", "path"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("name", ["norm", "lion", "soft_topk"])
def test_a_page_of_committed_results(name: str) -> None:
    header, records = read(RESULTS / f"{name}.json")
    seen = Checked(page.page(header, records))
    assert header["gpu"] in seen.text
    for record in records:
        assert record["impl"] in seen.text
        assert f"{record['us']:,.1f} µs, {record['copy_pct']:.0f} %" in seen.text
    for fault in [*header["failed"], *header["disagreeing"]]:
        assert fault["note"] in seen.text
    assert ("svg" in seen.tags) == (name == "norm" or name == "soft_topk")
    assert "script" not in seen.tags


def test_names_give_no_orders_to_a_browser() -> None:
    record = {
        "op": "<b>op", "pass": "forward", "case": {"mode": "<i>"}, "dtype": "float32", "us": 1.0, "copy_pct": 5.0,
        "impl": "<script>alert(1)</script>",
    }  # fmt: skip
    header = {"copy_gbps": 1.0, "gpu": "<u>", "failed": [], "missing": ["<a>"], "complete": False}
    seen = Checked(page.page(header, [record]))
    assert not {"script", "i", "u", "a"} & set(seen.tags[seen.tags.index("body") :]) - {"i"}
    assert "<script>alert(1)</script>" in seen.text
    assert "This run ended early" in seen.text


@pytest.mark.usefixtures("fake_operator")
def test_the_command_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timers, "CpuTimer", lambda **options: FakeTimer())
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = tmp_path / "new" / "bench.html"
    assert main(["bench", "--html", str(path)]) == 0
    assert f"wrote {path}" in capsys.readouterr().out.replace("\n", "")
    seen = Checked(path.read_text())
    assert re.search(r"10\.0 µs, 1 %", seen.text)
    assert "failed: raises at fake forward" in seen.text
    (tmp_path / "folder").mkdir()
    assert main(["bench", "--html", str(tmp_path / "folder")]) == 2
    assert "it is a directory" in capsys.readouterr().err

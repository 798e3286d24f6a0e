from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onepass.train import html, pictures
from onepass.train.model import new
from onepass.train.trace import Trace, trace
from train.tiny import TINY, config, printed

PNG = b"\x89PNG\r\n\x1a\n"
TAGS = {
    "html", "head", "meta", "title", "style", "body", "h1", "p", "div", "span", "b", "input", "label", "pre", "i", "u",
    "table", "caption", "tr", "th", "td",
}  # fmt: skip
ENCODE = pictures._png  # which other tests do without
EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(1)> & \"quotes\" 'too' &lt;b&gt;\n"


@pytest.fixture(autouse=True)
def _encoded(_quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "_png", ENCODE)


def traced(content: bytes, name: str = "text.txt", **values: object) -> Trace:
    values = {"model": "routed", "dim": 8, "blocks": 1, "seq": 16, **values}
    return trace(new(config(**values)).eval(), config(**values), name, content, 4096)


class Reader(HTMLParser):
    """What a browser would make of the page: its tags, its links, the text of <pre>."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.within: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attributes if name in {"src", "href", "action", "onerror"}]
        if tag not in {"meta", "input"}:
            self.within.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.within.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if "pre" in self.within else ""


@settings(max_examples=30)
@given(text=st.text(max_size=80), name=st.text(max_size=20))
def test_no_text_breaks_out(text: str, name: str):
    content = (EVIL + text).encode("utf-8", "surrogatepass")
    page = html.page(traced(content, name), EVIL + name)
    reader = Reader(page)
    assert set(reader.tags) <= TAGS
    assert reader.links == []
    rest = re.sub(r"<pre>.*</pre>", "", page, flags=re.DOTALL).replace(EVIL, "")
    assert not re.search(r"https?:|//|url\(|@import", rest)
    assert reader.text.startswith(EVIL.replace("\n", "↵\n"))


@pytest.mark.slow
def test_show(texts: Path, tmp_path: Path):
    run, letter, other = tmp_path / "run", tmp_path / "a letter.txt", tmp_path / "new" / "place"
    printed("train", texts, *TINY, "--steps", 2, "--out", run)
    assert (run / "loss.png").read_bytes().startswith(PNG)
    assert "Which expert takes each byte" in (run / "routing.html").read_text()
    letter.write_text("Dear reader,\n" + EVIL)
    printed("show", run, letter)
    printed("show", run, letter, "--out", other, "--bytes", 20)
    for folder in (run, other):
        page = (folder / "a letter.txt.routing.html").read_text()
        assert "Dear" in re.sub("<[^>]*>", "", page)
        assert "<script" not in page
    assert "the first 20 of" in page
    # a name that is no text
    strange = os.fsdecode(bytes(tmp_path) + b"/caf\xe9.txt")
    Path(strange).write_text("some text")
    printed("show", run, strange)
    # a directory with pictures of ours is still a run, and may be started over
    printed("train", texts, *TINY, "--steps", 2, "--out", run, "--force")
    assert not (run / "a letter.txt.routing.html").exists()

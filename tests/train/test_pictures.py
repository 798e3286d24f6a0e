from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import rc_context, rcParams

from onepass.train import html, pictures
from onepass.train.model import new
from onepass.train.trace import trace
from train.tiny import config

TAGS = {
    "html", "head", "meta", "title", "style", "body", "h1", "p", "div", "span", "b", "input", "label", "pre", "i", "u",
    "table", "caption", "tr", "th", "td",
}  # fmt: skip
EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(1)> & \"quotes\" 'too' &lt;b&gt;\n"


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
@given(
    text=st.text(max_size=80), name=st.text(max_size=20),
    model=st.sampled_from(({"model": "routed"}, {"experts": 2}, {"experts": 0}, {"experts": 0, "task": "causal"})),
)  # fmt: skip
def test_no_text_breaks_out(text: str, name: str, model: dict[str, object]):
    content = (EVIL + text).encode("utf-8", "surrogatepass")
    settings = config(dim=8, blocks=1, seq=16, **model)
    page = html.page(trace(new(settings).eval(), settings, name, content, 4096), EVIL + name)
    reader = Reader(page)
    assert set(reader.tags) <= TAGS
    assert reader.links == []
    rest = re.sub(r"<pre>.*</pre>", "", page, flags=re.DOTALL).replace(EVIL, "")
    assert not re.search(r"https?:|//|url\(|@import", rest)
    assert reader.text.startswith(EVIL.replace("\n", "↵\n"))


def test_a_users_style_has_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures.Figure, "savefig", lambda _, out, **__: out.write(bytes(rcParams["text.usetex"])))
    with rc_context({"text.usetex": True}):
        assert pictures.loss_png([], config(), 3.0) == b""

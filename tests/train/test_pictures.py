from __future__ import annotations

import itertools
import os
import re
import warnings
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onepass.train import colours, html, pictures
from onepass.train.colours import INK, WRONG, shade
from onepass.train.model import new
from onepass.train.trace import Trace, cells, kinds, trace
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
    """What a browser would make of the page: its tags, its links, the text of <pre>, the class of every character."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text: list[tuple[str, str]] = []
        self.within: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attributes if name in {"src", "href", "action", "onerror"}]
        if tag not in {"meta", "input"}:
            self.within.append((tag, dict(attributes).get("class") or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.within.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if any(tag == "pre" for tag, _ in self.within):
            names = " ".join(name for tag, name in self.within if tag == "span")
            self.text += [(character, names) for character in data]


def test_cells():
    assert cells(b"a\tb\n") == ["a", "⇥", "b", "\n"]
    assert cells("é日".encode()) == ["é", "", "日", "", ""]
    assert cells(b"\xff\xc3(\x07") == ["·", "·", "(", "·"]
    assert cells("\u202e".encode()) == ["·", "", ""]


def test_trace():
    content = ("routed bytes and others, " * 9).encode()
    seen = traced(content, blocks=3)
    assert seen.routed.shape == (3, len(content))
    # 14 sequences of 16 bytes and one byte more: an eighth of each, at least one byte
    assert (seen.routed.sum(axis=1) == 14 * 2 + 1).all()
    assert (seen.counts == seen.routed.sum(axis=0)).all()
    assert seen.hidden.sum() == 14 * 2 + 1
    assert ((seen.guess >= 0) == seen.hidden).all()
    assert ((seen.chance > 0) == seen.hidden).all()


def test_the_page_shows_every_byte_with_its_choices():
    content = b"def f(x):\n    return x < 3 and x > 1\n" * 6
    seen = traced(content, blocks=2)
    page = html.page(seen, "here")
    for name, there in kinds(seen):
        share, mean = 100 * there.mean(), seen.counts[there].mean()
        assert f"<tr><th>{name}</th><td>{share:.1f} %</td><td>{mean:.2f}</td></tr>" in page
    reader = Reader(page)
    shown = "".join(character for character, _ in reader.text)
    assert shown.replace("↵", "") == content.decode()
    names = [names for character, names in reader.text if character != "\n"]
    for place, count in enumerate(seen.counts):
        assert (f"c{count}" in names[place].split()) == bool(count)
        for block in range(2):
            assert (f"r{block + 1}" in names[place].split()) == seen.routed[block, place]
        assert ("h" in names[place].split()) == seen.hidden[place]
        assert ("w" in names[place].split()) == (seen.hidden[place] and seen.guess[place] != content[place])


@pytest.mark.parametrize("task", ["masked", "causal"])
def test_the_page_colours_every_byte_by_its_expert(task: str):
    content = b"def f(x):\n    return x < 3 and x > 1\n" * 6
    seen = traced(content, blocks=2, model="transformer", experts=5, task=task)
    assert seen.chosen.shape == (2, len(content), 2)
    assert (seen.chosen[..., 0] != seen.chosen[..., 1]).all()
    page = html.page(seen, "here")
    reader = Reader(page)
    assert set(reader.tags) <= TAGS
    names = [names.split() for character, names in reader.text if character != "\n"]
    for place, best in enumerate(seen.chosen[..., 0].T):
        assert {f"b{block + 1}x{expert + 1}" for block, expert in enumerate(best)} <= set(names[place])
    # a table a block: loads have a mean of 1, a kind's parts are all of its choices
    tables = re.findall(r"<table.*?</table>", page)
    assert len(tables) == 2
    for block, table in enumerate(tables):
        cells = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>.*?</tr>", table)[1:]]
        loads = [float(row[0].split()[-1]) for row in cells]
        there = np.bincount(seen.chosen[block].ravel(), minlength=5)
        assert loads == pytest.approx(there / there.mean(), abs=0.006)
        parts = np.array([[int(cell.split()[0]) for cell in row[1:]] for row in cells])
        assert parts.sum(0) == pytest.approx(100, abs=3)
    assert f"--x5: {colours.expert_colour(4, 5)};" in page


@pytest.mark.parametrize("task", ["masked", "causal"])
def test_without_choices_the_page_shades_bytes_by_surprise(task: str):
    content = b"def f(x):\n    return x < 3 and x > 1\n" * 6
    seen = traced(content, model="transformer", experts=0, task=task)
    page = html.page(seen, "here")
    names = [names.split() for character, names in Reader(page).text if character != "\n"]
    shaded = [place for place, found in enumerate(names) if "c4" in found]
    assert shaded == list(np.flatnonzero((seen.guess >= 0) & (seen.chance <= 2.0**-4)))
    assert shaded
    rows = re.findall(r"<tr><th>.*?</th><td>([\d,]+)</td><td>(\d+) %</td>", page)
    assert sum(int(count) for count, _ in rows) == (seen.guess >= 0).sum()


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
    shown = "".join(character for character, _ in reader.text)
    assert shown.startswith(EVIL.replace("\n", "↵\n"))


def _linear(colour: str) -> list[float]:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def _contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2."""
    weights = 0.2126, 0.7152, 0.0722
    lights = [sum(w * part for w, part in zip(weights, _linear(c), strict=True)) for c in (one, other)]
    return (max(lights) + 0.05) / (min(lights) + 0.05)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 6, 12])
def test_shades_can_be_told_apart_and_read_on(blocks: int, dark: bool):
    shades = [shade(count, blocks, dark=dark) for count in range(blocks + 1)]
    ink, wrong = (colours.DARK_INK, colours.DARK_WRONG) if dark else (INK, WRONG)
    experts = [colours.expert_colour(expert, 3 * blocks, dark=dark) for expert in range(3 * blocks)]
    assert len(set(experts)) == 3 * blocks
    assert min(_contrast(colour, ink) for colour in experts) > 4.5
    assert len(set(shades)) == blocks + 1
    # in order of lightness, for eyes and printers without hues
    away = [_contrast(shades[0], colour) for colour in shades]
    assert away == sorted(away)
    assert min(_contrast(colour, ink) for colour in shades) > 4.5
    assert _contrast(shades[0], wrong) > 4.5
    # at the four blocks of the presets, every step is a fifth in lightness alone
    assert min(_contrast(*step) for step in itertools.pairwise(shades)) > (1.2 if blocks <= 4 else 1.04)


def test_the_page_follows_the_readers_scheme():
    page = html.page(traced(b"some text 123\n" * 9, blocks=3), "here")
    light, dark = page.split("@media (prefers-color-scheme: dark)")
    for count in range(4):
        assert f"--s{count}: {shade(count, 3)};" in light
        assert f"--s{count}: {shade(count, 3, dark=True)};" in dark
    # no colour stands outside the two palettes
    rest = dark.partition("}\n}")[2]
    assert rest
    assert not re.search(r"#[0-9a-f]{3,6}\b", rest)


def test_kinds_of_bytes():
    content = "ab 1_\n\té7".encode()
    seen = traced(content * 2, blocks=2)
    n = len(content)
    seen.chosen[:], seen.hidden[:] = -1, False
    seen.chosen[0, :n] = 0  # the first half in block 1
    seen.chosen[1, [0, n]] = 0  # both a in block 2
    counted = [(name, there.sum(), seen.counts[there].sum()) for name, there in kinds(seen)]
    assert counted == [
        ("letters", 4, 4), ("digits", 4, 2), ("whitespace", 6, 3), ("punctuation", 2, 1), ("other bytes", 4, 2),
    ]  # fmt: skip
    seen.hidden[0] = True
    assert [(name, list(np.flatnonzero(there))) for name, there in kinds(seen)][-1] == ("hidden from the model", [0])
    assert kinds(seen)[0][1].sum() == 3


@given(st.binary(max_size=60))
def test_kinds_are_all_of_the_text(content: bytes):
    seen = traced(content)
    assert sum(there.astype(int) for _, there in kinds(seen)) == pytest.approx(np.ones(len(content)))


def test_loss_picture():
    rows = [{"step": step, "bits_per_byte": 8.0 / step} for step in range(1, 9)]
    rows += [{"step": 4, "validation_bits_per_byte": 3.0}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (1, 4):
            assert pictures.loss_png(rows[:step], config(), 4.4).startswith(PNG)
        assert pictures.loss_png(rows, config(), 4.4).startswith(PNG)


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

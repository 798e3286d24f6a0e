"""What a run shows while it goes."""

from __future__ import annotations

import io
import sys

import pytest

from onepass.train.progress import say


def test_a_terminal_that_knows_ascii_only(monkeypatch: pytest.MonkeyPatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    say("16 × 256 bytes of caf\udce9")
    assert raw.getvalue() == b"16 \\xd7 256 bytes of caf\\udce9\n"

"""What the tests of `python -m research.ablate` share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from research.ablate.__main__ import main


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[[list[str]], str]:
    """Return what the command says when it refuses its options: one line, exit code 2."""

    def run(options: list[str]) -> str:
        try:
            code = main(options)
        except SystemExit as stop:
            code = stop.code
        assert code == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        return line

    return run

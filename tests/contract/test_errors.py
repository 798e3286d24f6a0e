"""Promise 3: bad input raises, and the words name the argument, what was given and what is accepted."""

from __future__ import annotations

import pytest

from harness import SPECS
from onepass.core.spec import BadCall


@pytest.mark.parametrize("bad", [pytest.param(b, id=f"{spec.name}-{b.name}") for spec in SPECS for b in spec.bad_calls])
def test_refused(bad: BadCall) -> None:
    with pytest.raises(bad.error, match=bad.match):
        bad.call()


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_every_operator_declares_bad_calls(spec) -> None:
    assert spec.bad_calls

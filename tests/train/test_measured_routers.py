"""What a measurement says of the routers agrees with what the loop counts itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from train.tiny import rows

Train = Callable[..., int]


@pytest.mark.parametrize("task", ["masked", "causal"])
@pytest.mark.parametrize("route", ["learned", "random", "none"])
def test_metrics_hold_them(train: Train, tmp_path: Path, task: str, route: str) -> None:
    assert train("--out", tmp_path / "run", "--task", task, "--route", route, "--steps", 3) == 0
    measured = [row for row in rows(tmp_path / "run") if "routed" in row]
    assert measured
    for row in measured:
        found = {name: value for name, value in row.items() if name.startswith("routing/")}
        shares = [value for name, value in found.items() if name.endswith("feed_forward.router/share")]
        if route == "none":
            assert not found
            continue
        assert sum(shares) / len(shares) == pytest.approx(row["routed"])
        # of two blocks, a token is chosen by both, by one or by none: |A| + |B| − |A ∩ B| = |A ∪ B|
        overlap = found["routing/blocks.1.feed_forward.router/overlap"]
        assert sum(shares) - overlap * shares[1] == pytest.approx(row["routed_once_at_least"])
        # random choices have gates of 1
        saturated = found["routing/blocks.0.feed_forward.router/saturated"]
        assert saturated == 1 if route == "random" else 0 <= saturated < 1

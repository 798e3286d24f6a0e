"""Garbage that a capture must not meet is collected before it, and nothing is collected during it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from onepass.core.garbage import collected, no_collection


class _Ring:
    def __init__(self) -> None:
        self.own = self


def test_rings_go_before_the_block_and_stay_during_it() -> None:
    before = weakref.ref(_Ring())
    with collected():
        assert before() is None
        during = weakref.ref(_Ring())
        # far more than start a collection
        _ = [[] for _ in range(100_000)]
        assert during() is not None
    gc.collect()
    assert during() is None


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("block", [collected, no_collection])
def test_the_collector_is_afterwards_as_before(
    block: Callable[[], AbstractContextManager[None]], enabled: bool
) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError), block():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()

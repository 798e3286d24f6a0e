"""How a property is attacked: cases from Hypothesis, each a small JSON record that can be run again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as with_seed
from hypothesis.strategies import SearchStrategy

Case = dict[str, Any]

# a case that takes longer is a finding: every loop in onepass is bounded
CASE_SECONDS = 120
# how long one finding may be made smaller
SHRINK_SECONDS = 20.0
# after so long it is another property's turn
TURN_SECONDS = 10.0


class FaultError(AssertionError):
    """A promise that a case breaks; `what` says which in a few words, equal for equal faults."""

    def __init__(self, what: str, message: str, **facts: Any) -> None:
        super().__init__(f"{what}: {message}")
        self.what, self.facts = what, facts


class SkipCase(Exception):  # noqa: N818 - an answer, no error
    """The case says nothing: what was drawn lies outside of what is promised."""


class SlowCaseError(Exception):
    """The case took longer than CASE_SECONDS."""


def require(condition: bool, what: str, message: str, **facts: Any) -> None:
    """Raise a FaultError unless the condition holds."""
    if not condition:
        raise FaultError(what, message, **facts)


@dataclass(frozen=True)
class Property:
    """Something onepass promises.

    Attributes:
        name: shown in the report.
        cases: strategy of JSON-able cases for a device ("cpu", "cuda" or "interpret").
        check: raises when the promise is broken for a case on a device.
        devices: where it has a meaning.
        share: how much of the time it gets, relative to the others.
        burst: examples in a turn.
        lacks: says what is missing here to check it, or None.
        expected: exceptions that are an answer and not a fault.
    """

    name: str
    cases: Callable[[str], SearchStrategy[Case]]
    check: Callable[[Case, str], None]
    devices: tuple[str, ...] = ("cpu", "cuda", "interpret")
    share: float = 1.0
    burst: int = 25
    lacks: Callable[[], str | None] = lambda: None


@dataclass
class Tally:
    """What was tried and found in one process."""

    tried: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    again: Counter[str] = field(default_factory=Counter)
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise SlowCaseError in the main thread after so many seconds."""

    def stop(*_: object) -> None:
        raise SlowCaseError(f"no answer after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def describe(prop: Property, case: Case, device: str, error: BaseException) -> dict[str, Any]:
    """One finding, as it is written down."""
    what = error.what if isinstance(error, FaultError) else f"{case.get('op', '')} raised {type(error).__name__}"
    facts = error.facts if isinstance(error, FaultError) else {"traceback": traceback.format_exception(error)[-12:]}
    return {
        "property": prop.name, "signature": f"{prop.name}: {what}", "device": device, "message": str(error)[:2000],
        "facts": facts, "case": case, "torch": torch.__version__,
    }  # fmt: skip


def attempt(prop: Property, case: Case, device: str) -> dict[str, Any] | None:
    """Run one case; the finding, or None when the promise holds. SkipCase goes through."""
    try:
        with time_limit(CASE_SECONDS):
            prop.check(case, device)
    except (SkipCase, KeyboardInterrupt):
        raise
    except Exception as error:
        return describe(prop, case, device, error)
    return None


class Found(Exception):  # noqa: N818 - tells Hypothesis to look for a smaller one
    """A case that breaks its promise in a way not seen before."""


def explore(prop: Property, device: str, seed: int, tally: Tally, deadline: float, note: Path | None = None) -> None:
    """Try a burst of fresh cases; the smallest case of each new fault goes into `tally.findings`."""
    best: dict[str, Any] = {}
    started, before = time.monotonic(), tally.tried[prop.name]
    turn_until = min(deadline, started + TURN_SECONDS)
    shrinking_until = deadline + 60

    @with_seed(seed)
    @settings(
        max_examples=prop.burst, database=None, derandomize=False, deadline=None, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink), verbosity=Verbosity.quiet,
        print_blob=False,
    )  # fmt: skip
    @given(prop.cases(device))
    def once(case: Case) -> None:
        nonlocal best, shrinking_until
        now = time.monotonic()
        # one case at least, however slow the machine
        if tally.tried[prop.name] > before and now > (shrinking_until if best else turn_until):
            return
        if note is not None:
            note.write_text(json.dumps({"property": prop.name, "case": case}))
        tally.tried[prop.name] += 1
        try:
            finding = attempt(prop, case, device)
        except SkipCase:
            tally.skipped[prop.name] += 1
            return
        if finding is None:
            return
        if finding["signature"] in tally.findings:
            tally.again[finding["signature"]] += 1
            return
        if best and finding["signature"] != best["signature"]:
            return
        if not best:
            shrinking_until = min(now + SHRINK_SECONDS, deadline + SHRINK_SECONDS)
        best = finding
        raise Found(finding["signature"])

    try:
        once()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Found, or Hypothesis' own complaint that the time for shrinking ended before it was done
        if not best:
            raise RuntimeError(f"{prop.name}: the property itself is wrong: {error}") from error
    if best:
        tally.findings[best["signature"]] = {**best, "seed": seed}
    tally.seconds[prop.name] += time.monotonic() - started


def write_finding(finding: dict[str, Any], folder: Path) -> Path:
    """Leave a finding as a file that `--replay` takes; one file per fault."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(finding["signature"].encode()).hexdigest()[:8]
    name = "".join(c if c.isalnum() else "-" for c in finding["signature"])[:80].strip("-")
    path = folder / f"{name}-{digest}.json"
    path.write_text(json.dumps(finding, indent=1, default=str) + "\n")
    return path

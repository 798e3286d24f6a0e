"""`--write` writes what today's compile takes to budgets.json, and shows the difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

BUDGETS = Path(__file__).with_name("budgets.json")
_today: dict[str, dict[str, list[int]]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write", action="store_true", help="write tests/codegen/budgets.json anew")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for _, (target, key, usage) in (p for p in report.user_properties if p[0] == "usage"):  # type: ignore[misc]
        _today.setdefault(target, {})[key] = usage


def read() -> dict[str, dict[str, list[int]]]:
    """Target → call and kernel → registers, bytes of local memory, of shared memory, of the widest load."""
    found: dict[str, dict[str, list[int]]] = json.loads(BUDGETS.read_text())
    return found


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    # with -n, the workers' reports arrive here
    if not config.getoption("--write", default=False) or hasattr(config, "workerinput"):
        return
    from codegen.test_codegen import cases

    before = read() if BUDGETS.exists() else {}
    budgets = {
        target: {key: usage for key in keys if (usage := (before.get(target, {}) | _today.get(target, {})).get(key))}
        for target, keys in cases().items()
    }
    for target in before | budgets:
        old, new = before.get(target, {}), budgets.get(target, {})
        for key in old | new:
            if old.get(key) != new.get(key):
                terminalreporter.write_line(f"{target} {key}: {old.get(key)} → {new.get(key)}")
    lines = (
        f"{json.dumps(target)}: {{\n"
        + ",\n".join(f"{json.dumps(k, ensure_ascii=False)}: {u}" for k, u in of.items())
        + "\n}"
        for target, of in budgets.items()
    )
    BUDGETS.write_text("{\n" + ",\n".join(lines) + "\n}\n")

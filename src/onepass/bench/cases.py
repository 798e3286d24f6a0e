"""What there is to measure: operators' cases from their specs, modules' cases from `onepass.nn.cases`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from onepass.core import spec
from onepass.core.spec import Case

# modules are built on operators, so no operator's spec can declare them; {target: cases} and RIVALS
MODULES = ("onepass.nn.cases",)


def modules() -> list[Any]:
    """Return the modules in MODULES that there are."""
    return [importlib.import_module(m) for m in MODULES if importlib.util.find_spec(m) is not None]


def all_cases() -> list[tuple[str, Case]]:
    """(target, case) of every case there is; a target is an operator's folder, modules are filed under theirs."""
    found: list[tuple[str, Case]] = [(f, c) for f in spec.folders() for c in getattr(spec.load(f), "CASES", ())]
    for module in modules():
        declared: Mapping[str, Sequence[Case]] = module.CASES
        found += [(target, case) for target, cases in declared.items() for case in cases]
    return found

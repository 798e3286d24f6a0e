"""Which tests run where: `gpu` needs CUDA, `interpret` needs TRITON_INTERPRET=1. The rest of a job is deselected.

Hypothesis tries the same examples in every run; HYPOTHESIS_PROFILE=random looks for others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from interpreter import speed_up
from onepass.core.launch import INTERPRET
from onepass.ops._shared.specs import folders, load

# neither a deadline nor "too slow": how busy the machine is proves nothing
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("random"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

if INTERPRET:
    speed_up()


def _belongs_here(item: pytest.Item) -> bool:
    # marks, not keywords: names of folders are keywords too
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        return False
    return INTERPRET or not item.get_closest_marker("interpret")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--operators", help="folders, as in norm,topk: contract tests of these operators alone")


def concerns(test: str, names: set[str]) -> bool:
    """Whether a contract test's id names one of these operators, or none at all."""
    operators = {found.name for folder in folders() for found in load(folder).SPECS}
    named = operators & set(re.findall(r"[a-z_]+", test.partition("[")[2]))
    return not named or bool(named & names)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Without a mark of its own a test's device is a CPU and, marked gpu, CUDA; and a bool that it takes is both."""
    marks = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    marked = {name for names in marks for name in (names.split(",") if isinstance(names, str) else names)}
    for name in [name for name in metafunc.fixturenames if name not in marked]:
        if name == "device":
            metafunc.parametrize(name, ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
        elif metafunc.function.__annotations__.get(name) in ("bool", bool):
            metafunc.parametrize(name, [False, True], ids=[f"not {name}", name])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    elsewhere = [item for item in items if not _belongs_here(item)]
    if chosen := config.getoption("--operators"):
        names = {found.name for folder in {*chosen.split(",")} & {*folders()} for found in load(folder).SPECS}
        contract = [item for item in items if "contract" in item.path.parts and item not in elsewhere]
        elsewhere += [item for item in contract if not concerns(item.name, names)]
    if elsewhere:
        config.hook.pytest_deselected(items=elsewhere)
    left_out = set(elsewhere)
    # slow ones first, so that no process is left with them alone at the end
    items[:] = sorted((i for i in items if i not in left_out), key=lambda i: i.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def _torch() -> Iterator[None]:
    """Each test has torch's random state anew, and leaves its settings as they were."""
    # torch.manual_seed also asks every backend that is not there: a millisecond for each of thousands of tests
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    threads = torch.get_num_threads()
    yield
    torch.set_default_dtype(torch.float32)
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)

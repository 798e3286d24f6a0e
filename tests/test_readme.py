"""The README's examples run as they stand, and every figure of README and start.md is that of a committed record."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
FIGURE = re.compile(r"\d[\d.]*(?: ?(?:×(?!\d)|%)| (?:ms|µs|MiB|bytes|bits)\b)")
Record = dict[str, Any]


def records(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))


def one(name: str, **wanted: Any) -> Record:
    """The first record with these values; cases are looked up by theirs."""
    for record in records(name)[1:]:
        seen = {**record, **(record["case"] if isinstance(record.get("case"), dict) else {})}
        if all(seen.get(field) == value for field, value in wanted.items()):
            return dict(record)
    raise AssertionError(f"{name} has no record of {wanted}")


def llama(field: str, mode: str, *ways: str) -> list[float]:
    name = "h100/raw/swapped_llama.json"
    return [one(name, program=f"Llama 3.2 1B, {way}", mode=mode)[field] for way in ways]


def steps_of_llama() -> list[float]:
    """Milliseconds as it is, with Liger's norms and swapped, and compiled as it is and swapped."""
    eager = llama("gpu_us", "eager", "as it is", "Liger's norms", "swapped")
    return [us / 1e3 for us in (*eager, *llama("gpu_us", "compiled", "as it is", "swapped"))]


def swapped() -> Iterable[str]:
    told = "{:.1f} ms as it is, {:.1f} ms with Liger's norms, {:.1f} ms swapped; compiled {:.1f} and {:.1f} ms"
    yield told.format(*steps_of_llama())
    yield "{:.0f} → {:.0f} MiB".format(*llama("peak_mib", "eager", "as it is", "swapped"))


def norms() -> Iterable[str]:
    cells: dict[tuple[str, ...], dict[str, Record]] = {}
    for record in records("h200/norm.json")[1:]:
        if record["pass"] == "forward" and not record["case"].get("residual"):
            cells.setdefault((record["op"], str(record["case"]), record["dtype"]), {})[record["impl"]] = record
    wide = [cell["onepass"]["copy_pct"] for cell in cells.values() if 4096 <= cell["onepass"]["case"]["cols"] <= 8192]
    yield f"{min(wide):.0f} to {max(wide):.0f} % of the speed of a copy"
    ratios = [
        min(r["us"] for i, r in cell.items() if i != "onepass") / cell["onepass"]["us"] for cell in cells.values()
    ]
    level = sum(ratio >= 1 for ratio in ratios)
    yield f"in {level} of {len(ratios)} forward cells of all widths, {100 * (1 - min(ratios)):.0f} % behind at worst"


def selection() -> Iterable[str]:
    cells = {(r["cols"], r["k"], r["dtype"], r["rows"]): r for r in records("h100/raw/topk_rivals.json")["rows"]}
    ours, theirs, torch = (
        cells[131072, 2048, "float32", 64][i] for i in ("onepass", "flashinfer deterministic", "torch.topk")
    )
    yield f"{ours:.0f} µs | FlashInfer, deterministic: {theirs:.0f} µs; `torch.topk`, ties by chance: {torch:.0f} µs"
    ours, torch = (cells[1 << 20, 65536, "bfloat16", 8][i] for i in ("onepass by index", "torch.topk unsorted"))
    yield f"{ours:.0f} µs | `torch.topk`, ties by chance: {torch:.0f} µs"


def llama_step(impl: str, dtype: str, low: str = "none") -> tuple[float, int]:
    """Milliseconds, and bytes a weight without the gradient, which the records count as well."""
    r = one("h200/lion.json", model="llama-1b", impl=impl, dtype=dtype, low_precision=low, momentum=None)
    bytes_kept = round(r["kept_mib"] * 2**20 / r["case"]["elements"])
    return r["us"] / 1e3, bytes_kept - {"float32": 4, "bfloat16": 2}[dtype]


def states() -> Iterable[str]:
    fp32 = llama_step("onepass", "float32")[1], llama_step("torch AdamW fused", "float32")[1]
    bf16 = llama_step("onepass", "bfloat16", "remainder")[1], llama_step("torch AdamW fused", "bfloat16")[1]
    yield "fp32: {} bytes a weight and its states, AdamW {}; ".format(*fp32)
    yield "bf16 with the default remainder: {}, AdamW {}".format(*bf16)


def lion() -> Iterable[str]:
    ours, adamw = llama_step("onepass", "float32"), llama_step("torch AdamW fused", "float32")
    other = one("h200/lion.json", model="llama-1b", impl="lion-pytorch triton", dtype="float32")["us"] / 1e3
    yield "{:.2f} ms, {} bytes a weight".format(*ours)
    yield "lion-pytorch's Triton kernel: {:.2f} ms; torch's fused AdamW: {:.2f} ms, {} bytes".format(other, *adamw)
    ours, adamw = llama_step("onepass", "bfloat16", "remainder"), llama_step("torch AdamW fused", "bfloat16")
    yield "{:.2f} ms, {} bytes | torch's fused AdamW, without one: {:.2f} ms, {} bytes".format(*ours, *adamw)
    best = {
        r["impl"]: r["us"]
        for r in records("cpu/lion.json")[1:]
        if r["case"].get("model") == "one tensor of 16 M" and r["case"].get("fused") == "fused"
    }
    yield f"`Lion(fused=True)` {min(us for i, us in best.items() if i != 'onepass') / best['onepass']:.2f}×"


MODES = ("eager", "compiled", "reduce-overhead", "graph")


def step(layer: str, case: str, mode: str) -> str:
    """How many times as fast a routed layer's step is as the dense one's in the same mode."""
    found: dict[str, float] = {}
    for name in ("program", "program_graphs", "program_tokens"):
        found |= {
            r["program"]: r["wall_us"]
            for r in records(f"h200/raw/{name}.json")[1:]
            if (r.get("case"), r.get("mode")) == (case, mode)
        }
    dense = {"RoutedBlock": "dense block", "RoutedFeedForward": "dense feed-forward"}[layer]
    return f"{found[dense] / found[layer]:.2f}×"


def steps() -> Iterable[str]:
    for case in ("2x4096, d 768", "2x8192, d 512", "2x32768, d 1024"):
        yield f"| {case.replace('x', '×')} | " + " | ".join(step("RoutedBlock", case, mode) for mode in MODES) + " |"


def envelope() -> Iterable[str]:
    folder = ROOT / "benchmarks" / "results" / "h100" / "envelope"
    runs = [r for path in sorted(folder.glob("*/equal*.json")) for r in json.loads(path.read_text())["runs"]]

    def best(n: int, arm: str) -> str:
        found: dict[float, dict[int, list[float]]] = {}
        for r in runs:
            if (r["kind"], r["task"], r["n"], r["arm"]) == ("run", "causal", n, arm):
                found.setdefault(r["asked_seconds"], {}).setdefault(r["dim"], []).append(r["final"]["bits"])
        bits = [min(sum(seeds) / len(seeds) for seeds in widths.values()) for _, widths in sorted(found.items())]
        return ", ".join(f"{b:.3f}" for b in bits[:-1]) + f" and {bits[-1]:.3f}"

    for n, name in ((8192, "8 k in view"), (32768, "32 k")):
        yield f"dense {best(n, 'dense')}, routed {best(n, 'learned')} with {name}"


FIGURES: dict[str, list[Callable[[], Iterable[str]]]] = {
    "README.md": [swapped, norms, selection, lion, steps, envelope],
    "docs/start.md": [states],
}


def test_the_page_of_speed_has_the_steps_of_the_record() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for case in ("2x8192, d 512", "2x32768, d 1024"):
        for layer in ("RoutedFeedForward", "RoutedBlock"):
            assert f"| `{layer}` | " + " | ".join(step(layer, case, mode) for mode in MODES) + " |" in page


@pytest.mark.parametrize(("file", "layer"), [("block", "RoutedBlock"), ("routed", "RoutedFeedForward")])
def test_the_docstrings_figures_are_of_the_record(file: str, layer: str) -> None:
    words = '{} in eager, {} compiled, {} with ``mode="reduce-overhead"``, {} in a CUDA graph (`graphed`)'
    told = words.format(*(step(layer, "2x8192, d 512", mode) for mode in MODES))
    assert told in " ".join((ROOT / "src" / "onepass" / "nn" / f"{file}.py").read_text(encoding="utf-8").split())


@pytest.mark.parametrize("code", BLOCKS, ids=lambda c: c.strip().splitlines()[0][:40])
def test_example(code: str) -> None:
    if "transformers" in code:
        pytest.importorskip("transformers")
    exec(compile(code, "README.md", "exec"), {})


def test_it_is_short_and_has_an_example_per_operator() -> None:
    assert len(README.splitlines()) <= 80
    assert README.count("](") <= 12
    for name in (
        "swap",
        "layer_norm",
        "rms_norm",
        "weighted_sum",
        "coor_descent",
        "soft_topk",
        "topk",
        "Lion",
        "RoutedBlock",
    ):
        assert name in "\n".join(BLOCKS), f"no example of {name}"


@pytest.mark.parametrize("page", FIGURES)
def test_every_figure_is_of_a_record(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    flat = " ".join(text.split())
    for told in (told for figures in FIGURES[page] for told in figures()):
        assert told in flat, f"{page} should say: {told}"
        flat = flat.replace(told, "")
    assert FIGURE.findall(flat) == []


def test_the_picture_is_of_the_record() -> None:
    drawing = (ROOT / "docs" / "llama_step.svg").read_text(encoding="utf-8")
    bars = re.findall(r'<rect [^>]*width="([\d.]+)"[^>]*/><text[^>]*>([\d.]+) ms<', drawing)
    told = steps_of_llama()
    assert [text for _, text in bars] == [f"{ms:.1f}" for ms in told]
    assert [float(width) for width, _ in bars] == pytest.approx([2.5 * ms for ms in told], abs=1)

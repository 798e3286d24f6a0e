"""README is short, and its figures, and those of other pages, are of committed records."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks.report import page
from research.budget import runs

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIGURE = re.compile(r"\d[\d.]*(?: ?(?:×(?!\d)|%)| (?:times|ms|µs|MiB|bytes|bits)\b)")
Record = dict[str, Any]


def records(name: str) -> Any:
    found = json.loads((path := ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))
    if (table := path.with_suffix(".md")).exists():
        assert table.read_text(encoding="utf-8") == page(found[0], found[1:]), f"{table}: write it anew by --report"
    return found


def made(header: Record) -> str:
    """The card and the day of a record."""
    return f"{re.findall('H[12]00', header['gpu'])[0]}, {header['date']}"


def by_case(found: Iterable[Record]) -> list[dict[str, Record]]:
    """Records of each implementation, case by case."""
    cells: dict[str, dict[str, Record]] = {}
    for r in found:
        cells.setdefault(str(r["case"]), {})[r["impl"]] = r
    return [*cells.values()]


LLAMA = [r for r in records("h200/lion.json")[1:] if r["case"].get("model") == "llama-1b"]


def swapped() -> Iterable[str]:
    header, *found = records("h200/swap.json")
    told = {(r["impl"], len(r["case"])): f"{r['us'] / 1e3:.1f} ms and {r['peak_mib']:.0f} MiB" for r in found}
    yield f"(random weights, 1×4096 tokens, bf16, {made(header)}): eager {told['as it is', 4]} at the peak as it is,"
    yield f"{told['liger', 4]} with Liger's norms, {told['onepass', 4]} swapped;"
    yield f"compiled {told['as it is, torch.compile', 5]} without onepass, {told['onepass', 5]} swapped."


def fastest(row: dict[str, float]) -> float:
    """The least time of all others in a row of the record: in any order, ties by chance or not."""
    return min(us for way, us in row.items() if not way.startswith("onepass"))


def selection() -> Iterable[str]:
    header, *found = records("h200/topk.json")
    yield f"torch {header['torch'].partition('+')[0][:4]}, the table in CUDA graphs with a cold L2"
    rows: dict[tuple[Any, ...], dict[str, float]] = {}
    for r in (r for r in found if r["op"] == "topk" and len(r["case"]) == 3):
        rows.setdefault((*r["case"].values(), r["dtype"]), {})[r["impl"]] = r["us"]
    few = [row for call, row in rows.items() if call[0] >= 256 and call[2] <= 64]
    ratios = [row["torch.topk"] / row["onepass"] for row in few]
    yield f"(k ≤ 64), `torch.topk` takes {min(ratios):.0f} to {max(ratios):.0f} times our time"
    ratios = [fastest(row) / row["onepass"] for row in few]
    yield f"takes {min(ratios):.1f} to {max(ratios):.1f} times"
    calls = ("autoencoder", 4096, 65536, 32), ("expert router", 65536, 64, 8), ("vocabulary", 4096, 50257, 50)
    for name, *call in calls:
        both = [rows[(*call, dtype)] for dtype in ("float32", "bfloat16")]
        told = " | ".join(f"{r['onepass']:.0f} | {r['torch.topk']:.0f} | {fastest(r):.0f}" for r in both)
        yield "| {}: {}×{}, k = {} | ".format(name, *call) + told + " |"
    less = [100 - 100 * ours / theirs for recipe, (theirs, ours) in recipes().items() if "TopK" in recipe]
    assert made(records("h200/raw/recipes.json")) == made(header)
    yield f"take {min(less):.0f} to {max(less):.0f} % less time ([choosing k](docs/topk.md)). {made(header)},"
    many = rows[8, 1 << 20, 65536, "bfloat16"]
    assert fastest(many) == many["flashinfer, no order"]
    told = f"{many['onepass, by index']:.0f} µs, `torch.topk` {many['torch.topk, no order']:.0f}"
    yield f"{told}, FlashInfer without an order {fastest(many):.0f}"
    free = (row for call, row in rows.items() if call[0] <= 64 and call[2] == 2048)
    ratios = [row["flashinfer, no order"] / row["onepass, by index"] for row in free]
    yield f"FlashInfer, without order and determinism, takes {min(ratios):.2f} to {max(ratios):.2f} times our time"
    yield topk_on_a_cpu()


def recipes() -> dict[str, list[float]]:
    """ms of other libraries' steps, without onepass and with it."""
    rows = records("h200/raw/recipes.json")["rows"]
    names = [f"{r['recipe']}, {r['mode']}" for r in rows]
    return {name: [r["ms"] for r, of in zip(rows, names, strict=True) if of == name] for name in names}


def topk_on_a_cpu() -> str:
    cells = records("cpu/raw/topk_ties.json")["rows"]
    ratios = [cell["topk"] / cell["torch.topk"] for cell in cells if cell["torch.topk"] >= 1000]
    return f"takes {min(ratios):.1f} to {max(ratios):.1f} times `torch.topk`'s time"


def kept(r: Record) -> int:
    """Bytes a weight without the gradient, which the records count as well."""
    return round(r["kept_mib"] * 2**20 / r["case"]["elements"]) - {"float32": 4, "bfloat16": 2}[r["dtype"]]


def llama_step(impl: str, dtype: str, low: str = "none") -> tuple[float, int]:
    """Milliseconds, and bytes a weight."""
    plain = [r for r in LLAMA if r["impl"] == impl and len(r["case"]) == 4]
    (r,) = (r for r in plain if (r["dtype"], r["case"]["low_precision"]) == (dtype, low))
    return r["us"] / 1e3, kept(r)


def states() -> Iterable[str]:
    fp32 = llama_step("onepass", "float32")[1], llama_step("torch AdamW fused", "float32")[1]
    bf16 = llama_step("onepass", "bfloat16", "remainder")[1], llama_step("torch AdamW fused", "bfloat16")[1]
    yield "fp32: {} bytes a weight and its states, AdamW {}; ".format(*fp32)
    yield "bf16 with the default remainder: {}, AdamW {}".format(*bf16)


def lion() -> Iterable[str]:
    """Beside ours the fastest of all others with as many bytes, and AdamW."""
    yield f"eager step of Llama 3.2 1B, {made(records('h200/lion.json')[0])}"
    names = {"lion-pytorch triton": "lion-pytorch, Triton", "optimi kahan": "optimi, Kahan"}
    default = "bf16 with a remainder (default)", "bfloat16", "remainder"
    for what, dtype, low in (("fp32", "float32", "none"), default, ("bf16 without", "bfloat16", "none")):
        ours, adamw = llama_step("onepass", dtype, low), llama_step("torch AdamW fused", dtype)
        same = [r for r in LLAMA if r["impl"] != "onepass" and (r["dtype"], kept(r)) == (dtype, ours[1])]
        best = min(same, key=lambda r: r["us"])
        other = f"{names.get(best['impl'], best['impl'])}: {best['us'] / 1e3:.2f} ms"
        yield "| {} | {:.2f} ms, {} bytes | {} | {:.2f} ms, {} bytes |".format(what, *ours, other, *adamw)
    cells = by_case(r for r in records("cpu/lion.json")[1:] if r["case"].get("fused") == "fused")
    ratios = [cell.pop("onepass")["us"] / min(r["us"] for r in cell.values()) for cell in cells]
    yield f"`Lion(fused=True)` takes {min(ratios):.2f} to {max(ratios):.2f} times the fastest other's time"


COMPILED, SONIC, GRAPH = "torch, torch.compile", "sonic-moe", ", CUDA graph"
RUNS = ("experts", "gelu"), ("raw/experts_apart", "swiglu"), ("experts", "swiglu"), ("raw/experts_one_matrix", "swiglu")
GELU, APART, SWIGLU, BESIDE = (  # SonicMoE in a run of its own
    by_case(r for r in records(f"h200/{file}.json")[1:] if r["case"]["act"] == act) for file, act in RUNS
)


def in_transformers() -> str:
    record = ROOT / "benchmarks/results/h200/raw/experts_transformers.jsonl"  # its first line is the header
    lines = map(json.loads, record.read_text(encoding="utf-8").splitlines()[1:])
    found = [r for r in lines if (r["tree"], r["tokens"]) == ("joint", 8192)]
    ms = {(r["mode"], r["impl"]): r["ms"] for r in found}
    times = [ms[mode, impl] for mode in ("eager", "compiled") for impl in ("grouped_mm", "onepass")]
    return "{:.1f} ms eager, with ours {:.1f}; compiled {:.1f} and {:.1f}".format(*times)


def experts() -> Iterable[str]:
    yield f"forward and backward (CUDA graph, bf16, {made(records('h200/experts.json')[0])})"
    told = "with GELU compiled torch takes {} times our time; with SwiGLU {}, SonicMoE {} times"
    beside = (GELU, COMPILED), (SWIGLU, COMPILED), (BESIDE, SONIC)
    ratios = [[cell[i + GRAPH]["us"] / cell["onepass" + GRAPH]["us"] for cell in cells] for cells, i in beside]
    yield told.format(*(f"{min(found):.2f} to {max(found):.2f}" for found in ratios))
    yield in_transformers()


def budgets() -> dict[str, str]:
    """Bits, means over seeds, of families' best models, by family, seconds and what sets a model apart."""
    found: dict[str, list[Any]] = {}
    for folder, text in (("budget", ""), ("budget_long", "long"), ("budget_709", "709")):
        for run, record in runs.load(ROOT / "benchmarks/results/h200" / folder):
            apart = [name for name in ("task", "n", "chosen", "grams") if getattr(run, name) != getattr(runs.Run, name)]
            size = f"d{run.width}" * (run.width != 256) + "e64" * (run.experts == 64) + "far" * (run.n > 32768)
            size += f"b{run.depth}" * (run.depth != (4 if run.width == 256 or run.seconds == 60 else 6))
            name = "".join([f"{run.family}{run.seconds:.0f}", *apart, size, text])
            found.setdefault(name, []).append((run, record))
    best = {name: next(iter(of.values())) for name, pairs in found.items() for of in runs.best(pairs).values()}
    return {name: f"{fmean(record['bits'] for _, record in seeds):.3f}" for name, seeds in best.items()}


def budget() -> Iterable[str]:
    yield (
        "{experts60} bits with experts and {global60} without; dense {dense60}, windows alone {windows60}, routed "
        "blocks {routed60}; after 200 s {experts200e64} (64 experts) and {global200d384} (d 384); after 600 s "
        "{experts600} and {global600d512} (d 512), on a longer text {experts600d384e64long} (d 384) and "
        "{global600d512long} (d 512). 32 k, after 200 s: {experts200n} and {global200n}. Hidden bytes, 200 s: dense "
        "{dense200task}, experts {experts200task}, without {global200task}."
    ).format(**budgets())


def evidence() -> Iterable[str]:
    for told in (
        "16 experts {experts600d512709}, d 384 with 64 {experts600d384e64709}, d 256 with 32 {experts600709},",
        "keys: {global60nchosen}, {global200nchosen}, with experts¹ {experts60nchosen}, {experts200nchosen}.",
        "alone {windows60}, {windows200}, {windows600}, routed blocks {routed60}, {routed200}, {routed600}.",
        "{routed60n}, {routed200n}, {routed600nlong}; dense {dense60n}, {dense200n}, {dense600nlong}.",
        "experts¹ reached {experts600}, without {global600}, d 512 without {global600d512}.",
        "one global block and windows of 256 {global60n}, {global200n}, {global600nlong};",
        "alone {windows60nfar}, chosen keys {global60nchosenfar}, global {global60nfar}.", "| {global60} | {global200}",
        "| {experts60e64} | **{experts200e64}** | {experts600e64long}² |", "{experts60d384b6} | {experts200d384}¹ | |",
        "{dense60task}, experts {experts60task}, without {global60task}", "| {global60d384b6} | {global200d384} | |",
        "| {global60d512b6} | {global200d512} | {global600d512long} |", "{experts200d512} | {experts600d512long}² |",
        "{global60grams} after 60 s, with experts¹ {experts60grams}.", "{dense60}, {dense200} and (183 MB) {dense600}",
        "200 s {dense200task}, {experts200task}, {global200task}.", "{windows60n}, {windows200n}, {windows600nlong};",
        "{experts60n}, {experts200n}, **{experts600nlong}**;", "¹: {experts200e64b6}, of 32: {experts200b6})",
        "| **{experts60}** | {experts200} |", "**{experts600d384e64long}** |", "without {global600d512709}.",
    ):  # fmt: skip
        yield told.format(**budgets())


def processes() -> Iterable[str]:
    told = "{:.2f} ms alone, {:.2f} ms on two H200 and {:.2f} ms on four, which keep {:.1f} and {:.1f} %"
    for name, words in (("preset", told), ("ahead", "{:.2f}, {:.2f} and {:.2f} ms, {:.1f} and {:.1f} %")):
        found = [r for r in records(f"h200/raw/data_parallel_{name}.json")["records"] if r["flush"] == 10]
        alone, *ms = (fmean(r["step_ms"] for r in found if r["processes"] == count) for count in (1, 2, 4))
        yield words.format(alone, *ms, *(100 * alone / t for t in ms))
    two, four = (r["main_job_fsdp"]["step_ms"] for r in records("h200/raw/data_parallel_four.json")["records"][1:])
    yield f"{two:.1f} and {four:.1f} ms, {100 * alone / two:.0f} and {100 * alone / four:.0f} %"


def speed() -> Iterable[str]:
    """First how many times as fast a routed layer's step is as the dense one's in the same mode."""
    runs = [r for name in ("", "_graphs", "_tokens") for r in records(f"h200/raw/program{name}.json")[1:]]
    ms = {(r["program"], r.get("case"), r.get("mode")): r["wall_us"] for r in runs}
    for case in ("2x8192, d 512", "2x32768, d 1024"):
        for layer, dense in (("RoutedFeedForward", "dense feed-forward"), ("RoutedBlock", "dense block")):
            modes = ("eager", "compiled", "reduce-overhead", "graph")
            told = (f"{ms[dense, case, mode] / ms[layer, case, mode]:.2f}×" for mode in modes)
            yield f"| `{layer}` | {' | '.join(told)} |"
    for r in records("h200/raw/decoding.json")["records"]:
        yield "| {windows ms:.3f} | {torch windows ms:.3f} | {experts ms:.3f} |".format(**r)
    blocks = [r for r in records("h200/fused.json")[1:] if r["op"] == "transformer_block"]
    us = {(r["impl"], *(r["case"][of] for of in ("n", "dim", "window"))): f"{r['us']:.0f}" for r in blocks}
    told = "{} µs with windows of 128, {} without; torch compiled, `flex_attention` for windows, {} and {};"
    for n, dim, words in ((8192, 256, told), *((n, 512, "{} and {}, torch {} and {}") for n in (8192, 32768))):
        ways = ((f"{by}, CUDA graph", n, dim, window) for by in ("onepass", "torch.compile") for window in (128, 0))
        yield words.format(*map(us.__getitem__, ways))
    yield topk_on_a_cpu()


def choices() -> Iterable[str]:
    for library in ("SAELens 6.54", "dictionary_learning 0.1", "sparsify 1.3"):
        ways = [recipes().get(f"{library.split()[0]} {way}, eager") for way in ("TopK", "TopK, AuxK", "BatchTopK")]
        yield f"| {library} |" + "|".join(" {:.1f}, {:.1f} ".format(*ms) if ms else " " for ms in ways) + "|"


def expert_table() -> Iterable[str]:
    for gelu, gated, beside in zip(GELU, SWIGLU, BESIDE, strict=True):
        ways = (gelu, "onepass"), (gelu, COMPILED), (gated, "onepass"), (gated, COMPILED)
        told = " | ".join(f"{cell[impl + GRAPH]['us']:.0f}" for cell, impl in ways)
        yield f"{told} | {beside[SONIC + GRAPH]['us'] / beside['onepass' + GRAPH]['us']:.2f}× |"
        for of, best in (ways[1], ways[3], (beside, SONIC)):  # products alone are no rival
            assert fastest(us := {i: r["us"] for i, r in of.items() if GRAPH in i and i[0] != "p"}) == us[best + GRAPH]
    largest = *(of[-1][i] for of in (GELU, SWIGLU) for i in ("onepass", COMPILED)), BESIDE[-1][SONIC]
    m = [f"{r['peak_mib'] - r['kept_mib']:.0f}" for r in largest]  # above the weights, of which SonicMoE had copies
    yield f"GELU {m[0]} MiB, torch compiled {m[1]}; with SwiGLU {m[2]}, torch compiled {m[3]}, SonicMoE {m[4]}"
    yield "first row takes {:.1f} ms, ours {:.1f}".format(*(APART[0][i]["us"] / 1e3 for i in (SONIC, "onepass")))
    yield f"`fused_moe` takes {SWIGLU[-1]['liger']['us'] / SWIGLU[-1]['onepass']['us']:.2f} times our time in the last"
    yield in_transformers()


FIGURES: dict[str, list[Callable[[], Iterable[str]]]] = {
    "README.md": [swapped, selection, lion, experts, budget], "docs/start.md": [states], "docs/scale.md": [processes],
    "docs/performance.md": [speed], "docs/topk.md": [choices], "docs/experts.md": [expert_table],
    "docs/evidence.md": [evidence],
}  # fmt: skip


def test_it_is_short_and_has_an_example_of_each_part() -> None:
    assert len(README.splitlines()) <= 80
    assert README.count("](") <= 12
    assert all(f"{name}(" in README for name in ("topk", "swap", "Lion", "Experts", "TransformerBlock"))


@pytest.mark.parametrize("page", FIGURES)
def test_every_figure_is_of_a_record(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    flat = left = " ".join(text.split())
    for told in (told for figures in FIGURES[page] for told in figures()):
        assert told in flat, f"{page} should say: {told}"
        left = left.replace(told, "")
    assert FIGURE.findall(left) == [] or page in [*FIGURES][3:]

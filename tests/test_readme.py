"""The README's examples run as they stand, and every figure of README and start.md is that of a committed record."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from packages import fresh
from research.budget import runs

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
FIGURE = re.compile(r"\d[\d.]*(?: ?(?:×(?!\d)|%)| (?:times|ms|µs|MiB|bytes|bits)\b)")
Record = dict[str, Any]


def records(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))


def made(header: Record) -> str:
    """The card and the day of a record."""
    return f"{re.findall('H[12]00', header['gpu'])[0]}, {header['date']}"


def of_llama() -> list[Record]:
    return [r for r in records("h200/lion.json")[1:] if r["case"].get("model") == "llama-1b"]


def swapped() -> Iterable[str]:
    header, *found = records("h100/raw/swapped_llama.json")
    runs = {(r["program"].split(", ")[1], r["mode"]): r for r in found if "mode" in r}
    told = {run: f"{r['wall_us'] / 1e3:.1f} ms and {r['peak_mib']:.0f} MiB" for run, r in runs.items()}
    first = f"({made(header)}) takes {told['as it is', 'compiled']}".replace(
        "(", "(random weights, 1×4096 tokens, bf16, "
    )
    yield f"{first} at the peak without onepass, and {told['swapped', 'compiled']} swapped"
    eager = (told[way, "eager"] for way in ("as it is", "Liger's norms", "swapped"))
    yield "{} as it is, {} with Liger's norms, {} swapped".format(*eager)


def fastest(row: Record) -> float:
    """The least time of all others in a row of the record: in any order, ties by chance or not."""
    return min(us for way, us in row.items() if isinstance(us, float) and not way.startswith(("onepass", "read")))


def selection() -> Iterable[str]:
    record = records("h100/raw/topk_rivals.json")
    rows = record["rows"]
    yield f"{made(record)}, torch {record['torch'].partition('+')[0][:4]}, in CUDA graphs with a cold L2"
    few = [row for row in rows if row["k"] <= 64]
    ratios = [row["torch.topk"] / row["onepass"] for row in few]
    yield f"`torch.topk` takes {min(ratios):.0f} to {max(ratios):.0f} times our time"
    ratios = [fastest(row) / row["onepass"] for row in few]
    yield f"takes {min(ratios):.1f} to {max(ratios):.1f} times"
    cells = {(r["rows"], r["cols"], r["k"], r["dtype"]): r for r in rows}
    calls = ("autoencoder", 4096, 65536, 32), ("expert router", 65536, 64, 8), ("vocabulary", 4096, 50257, 50)
    for name, *call in calls:
        found = [cells[(*call, dtype)] for dtype in ("float32", "bfloat16")]
        told = " | ".join(f"{r['onepass']:.0f} | {r['torch.topk']:.0f} | {fastest(r):.0f}" for r in found)
        yield "| {}: {}×{}, k = {} | ".format(name, *call) + told + " |"
    trainers = records("h100/raw/topk_trainers.json")
    steps = [r for r in trainers["rows"] if r["what"].startswith("autoencoder step")]
    ours, torch = (min(r["us"] for r in steps if r["way"] == way) / 1e3 for way in ("onepass", "torch.topk"))
    yield f"takes {ours:.1f} ms, with `torch.topk` {torch:.1f} ({made(trainers['header'])})"
    many = cells[8, 1 << 20, 65536, "bfloat16"]
    assert fastest(many) == many["flashinfer no order"]
    told = f"{many['onepass by index']:.0f} µs, `torch.topk` {many['torch.topk unsorted']:.0f}"
    yield f"{told}, FlashInfer without an order {fastest(many):.0f}"
    ratios = [r["flashinfer no order"] / r["onepass by index"] for r in rows if r["rows"] <= 64 and r["k"] == 2048]
    yield f"FlashInfer, without order and determinism, takes {min(ratios):.2f} to {max(ratios):.2f} times our time"
    yield topk_on_a_cpu()


def topk_on_a_cpu() -> str:
    shapes = records("cpu/raw/topk_two_ways.json")["threads"]["1"].values()
    cells = [cell for shape in shapes for row in shape.values() for cell in row.values()]
    ratios = [cell["onepass"] / cell["torch.topk"] for cell in cells if cell["torch.topk"] >= 1000]
    return f"takes {min(ratios):.1f} to {max(ratios):.1f} times `torch.topk`'s time"


def kept(r: Record) -> int:
    """Bytes a weight without the gradient, which the records count as well."""
    return round(r["kept_mib"] * 2**20 / r["case"]["elements"]) - {"float32": 4, "bfloat16": 2}[r["dtype"]]


def llama_step(impl: str, dtype: str, low: str = "none") -> tuple[float, int]:
    """Milliseconds, and bytes a weight."""
    plain = [r for r in of_llama() if r["impl"] == impl and len(r["case"]) == 4]
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
    default, without = ("bf16, its default remainder", "bfloat16", "remainder"), ("bf16 without", "bfloat16", "none")
    for what, dtype, low in (("fp32", "float32", "none"), default, without):
        ours, adamw = llama_step("onepass", dtype, low), llama_step("torch AdamW fused", dtype)
        same = [r for r in of_llama() if r["impl"] != "onepass" and (r["dtype"], kept(r)) == (dtype, ours[1])]
        best = min(same, key=lambda r: r["us"])
        other = f"{names.get(best['impl'], best['impl'])}: {best['us'] / 1e3:.2f} ms"
        yield "| {} | {:.2f} ms, {} bytes | {} | {:.2f} ms, {} bytes |".format(what, *ours, other, *adamw)
    cells: dict[str, dict[str, float]] = {}
    for r in records("cpu/lion.json")[1:]:
        if r["case"].get("fused") == "fused":
            cells.setdefault(r["case"]["model"], {})[r["impl"]] = r["us"]
    ratios = [cell.pop("onepass") / min(cell.values()) for cell in cells.values()]
    yield f"`Lion(fused=True)` takes {min(ratios):.2f} to {max(ratios):.2f} times the fastest other's time"


def experts() -> Iterable[str]:
    """Over the products in the same run, and the least of all others; memory of a call without a graph."""
    yield f"forward and backward (CUDA graph, bf16, {made(records('h200/raw/experts.json')[0])})"
    beside = (
        ("experts", "GELU", "torch, torch.compile", "torch compiled"),
        ("experts_swiglu", "SwiGLU", "sonic-moe", "SonicMoE"),
    )
    for file, told, rival, name in beside:
        cells: dict[str, dict[str, Record]] = {}
        for r in records(f"h200/raw/{file}.json")[1:]:
            cells.setdefault(str(r["case"]), {})[r["impl"]] = r
        graphs = [{i[:-12]: r["us"] for i, r in cell.items() if i.endswith(", CUDA graph")} for cell in cells.values()]
        assert {min(us.keys() - {"onepass", "products"}, key=us.__getitem__) for us in graphs} == {rival}
        over = ([us[i] / us["products"] for us in graphs] for i in ("onepass", rival))
        ours, best = (f"{min(x):.2f} to {max(x):.2f} times" for x in over)
        peaks = " and ".join(f"{[*cells.values()][-1][i]['peak_mib']:.0f}" for i in ("onepass", rival))
        yield f"with {told} {ours}, {name} {best} (peak of the largest size: {peaks} MiB)"


MODES = ("eager", "compiled", "reduce-overhead", "graph")


def step(layer: str, case: str, mode: str) -> str:
    """How many times as fast a routed layer's step is as the dense one's in the same mode."""
    names = ("program", "program_graphs", "program_tokens")
    runs = [r for name in names for r in records(f"h200/raw/{name}.json")[1:]]
    found = {r["program"]: r["wall_us"] for r in runs if (r.get("case"), r.get("mode")) == (case, mode)}
    dense = {"RoutedBlock": "dense block", "RoutedFeedForward": "dense feed-forward"}[layer]
    return f"{found[dense] / found[layer]:.2f}×"


def budgets() -> dict[str, str]:
    """Bits, means over seeds, of families' best models, by family, seconds and what sets a model apart."""
    found: dict[str, list[Any]] = {}
    for run, record in runs.load(ROOT / "benchmarks/results/h200/budget"):
        apart = [name for name in ("n", "width", "chosen", "grams") if getattr(run, name) != getattr(runs.Run, name)]
        found.setdefault("".join([f"{run.family}{run.seconds:.0f}", *apart]), []).append((run, record))
    best = {name: next(iter(of.values())) for name, pairs in found.items() for of in runs.best(pairs).values()}
    return {name: f"{fmean(record['bits'] for _, record in seeds):.3f}" for name, seeds in best.items()}


def budget() -> Iterable[str]:
    told = "{experts60} bits with experts and {global60} without; dense {dense60}, windows alone {windows60}, "
    later = "; after 200 s {experts200} and {global200} (two seeds); after 600 s {experts600} and {global600}, but "
    yield (told + "routed blocks {routed60}" + later + "{global600width} at d 512 without").format(**budgets())


def test_the_page_of_evidence_has_the_bits_of_the_records() -> None:
    page = " ".join((ROOT / "docs" / "evidence.md").read_text(encoding="utf-8").split())
    for told in (
        "**{experts60}** | **{experts200}** | {experts600} |",
        "{global60} | {global200} | {global600} | | d 512, 6 blocks, without | 8.1 | 2053 | | | **{global600width}** |",
        "dense blocks reach {dense60}, windows alone {windows60}, routed blocks {routed60}.",
        "{global60grams} without experts, {experts60grams} with",
        "{experts60n} with experts ({experts200n} after 200 s), {global60n} without, {global60nchosen} where",
    ):
        assert told.format(**budgets()) in page


def processes() -> Iterable[str]:
    found = records("h200/raw/data_parallel_four.json")["records"]
    alone, two, four = (r["main_job"]["step_ms"] for r in found)
    of = f"{alone:.1f} ms alone, {two:.1f} ms on two H200 and {four:.1f} ms on four, which keep {100 * alone / two:.1f}"
    yield f"{of} and {100 * alone / four:.1f} %"
    two, four = (r["main_job_fsdp"]["step_ms"] for r in found[1:])
    yield f"{two:.1f} and {four:.1f} ms, {100 * alone / two:.0f} and {100 * alone / four:.0f} %"


FIGURES: dict[str, list[Callable[[], Iterable[str]]]] = {
    "README.md": [swapped, selection, lion, experts, budget],
    "docs/start.md": [states],
    "docs/scale.md": [processes],
}


def test_the_page_of_speed_has_the_steps_of_the_record() -> None:
    page = " ".join((ROOT / "docs" / "performance.md").read_text(encoding="utf-8").split())
    for case in ("2x8192, d 512", "2x32768, d 1024"):
        for layer in ("RoutedFeedForward", "RoutedBlock"):
            assert f"| `{layer}` | " + " | ".join(step(layer, case, mode) for mode in MODES) + " |" in page
    for r in records("h200/raw/decoding.json")["records"]:
        cells = (f"{r[f'{name} ms']:.3f}" for name in ("windows", "torch windows", "experts"))
        assert f"| {' | '.join(cells)} |" in page
    blocks = (f"h200/raw/transformer_block{of}.json" for of in ("", "_windows"))
    us = {(r["impl"], r["case"]["window"]): r["us"] for name in blocks for r in records(name)[1:]}
    told = "{:.0f} µs with windows of 128, {:.0f} without; torch compiled, `flex_attention` for windows, {:.0f} and"
    found = (us[f"{by}, CUDA graph", window] for by in ("onepass", "torch.compile") for window in (128, 0))
    assert told.format(*found) in page


@pytest.fixture
def small_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where the name of the model in README leads to a small one."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
    model.save_pretrained(tmp_path / re.findall(r'from_pretrained\("(.*?)"\)', README)[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("code", BLOCKS, ids=lambda c: c.strip().splitlines()[0][:40])
def test_example(code: str, request: pytest.FixtureRequest) -> None:
    if "transformers" in code:
        request.getfixturevalue("small_llama")
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.slow
def test_examples_run_where_only_what_readme_installs_is(small_llama: Path) -> None:
    """torch, which `pip install .` brings, and the packages that its other lines name, with what these require."""
    names = re.findall(r"pip install (?!\.)'?([\w-]+)", README)
    site = fresh(small_llama / "fresh", "torch", *names)
    (site / "onepass").symlink_to(ROOT / "src" / "onepass")
    code = "".join(f"exec({code!r}, {{}})\n" for code in BLOCKS) + "import onepass; print(onepass.__file__)"
    run = [small_llama / "fresh" / "bin" / "python", "-I", "-c", code]
    done = subprocess.run(run, cwd=small_llama, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site))


def test_it_is_short_and_has_an_example_of_each_part() -> None:
    assert len(README.splitlines()) <= 80
    assert README.count("](") <= 12
    assert all(name in "".join(BLOCKS) for name in ("topk", "swap", "Lion", "Experts", "TransformerBlock"))


def test_pages_say_how_slow_topk_is_on_a_cpu() -> None:
    for page in ("README.md", "docs/topk.md", "docs/performance.md"):
        assert topk_on_a_cpu() in " ".join((ROOT / page).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("page", FIGURES)
def test_every_figure_is_of_a_record(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    flat = " ".join(text.split())
    for told in (told for figures in FIGURES[page] for told in figures()):
        assert told in flat, f"{page} should say: {told}"
        flat = flat.replace(told, "")
    assert FIGURE.findall(flat) == []

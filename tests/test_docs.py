"""The pages keep their promises: examples run, named tests exist, tables and arguments of rivals are real."""

from __future__ import annotations

import inspect
import pydoc
import re
import subprocess
from pathlib import Path

import pytest
import torch

from onepass.optim import Lion
from packages import fresh

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
READMES = sorted((ROOT / "src").rglob("README.md"))
# lab notes are history
PAGES = [ROOT / "README.md", *READMES, *(p for p in sorted(DOCS.rglob("*.md")) if p.parent.name != "lab")]
EXAMPLES = {
    str(p.relative_to(ROOT)): re.findall(r"^```python\n(.*?)^```", p.read_text(), re.DOTALL | re.MULTILINE)
    for p in PAGES
}
NEEDS = {page: " ".join(re.findall("# pip install (.*)", "".join(found))) for page, found in EXAMPLES.items()}
BLOCKS = [(f"{page}:{number}", code) for page, blocks in EXAMPLES.items() for number, code in enumerate(blocks)]


@pytest.fixture
def small_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where the name of the model in README leads to a small one."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
    model.save_pretrained(tmp_path / re.findall(r'from_pretrained\("(.*?)"\)', PAGES[0].read_text())[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("name", "code"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_example(name: str, code: str, request: pytest.FixtureRequest) -> None:
    if "from_pretrained(" in code:
        request.getfixturevalue("small_llama")
    exec(compile(code, name, "exec"), {})


@pytest.mark.slow
@pytest.mark.parametrize("packages", sorted({*NEEDS.values()}), ids=lambda names: names or "torch alone")
def test_examples_run_where_only_what_their_page_installs_is(packages: str, small_llama: Path) -> None:
    """torch, which `pip install .` brings, and the packages that a page's examples name, with what these require."""
    site = fresh(small_llama / "fresh", "torch", *packages.split())
    (site / "onepass").symlink_to(ROOT / "src" / "onepass")
    blocks = [code for page, found in EXAMPLES.items() if NEEDS[page] == packages for code in found]
    code = "".join(f"exec({block!r}, {{}})\n" for block in blocks) + "import onepass; print(onepass.__file__)"
    run = [small_llama / "fresh" / "bin" / "python", "-I", "-c", code]
    done = subprocess.run(run, cwd=small_llama, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(str(site))


def test_all_pages_are_read_in_an_afternoon() -> None:
    rooms = [ROOT / room for room in ("docs", "src", "research", "examples", "contrib")]
    pages = [*ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md", *(p for room in rooms for p in room.rglob("*.md"))]
    counted = [p for p in pages if p.name != "CHANGELOG.md" and p.parent.name != "lab"]
    assert sum(len(path.read_text().split()) for path in counted) <= 18_000
    assert max(len(path.read_text().splitlines()) for path in READMES) <= 80
    assert (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].count(".md\n") <= 15 + 1  # and the changelog


def test_links_and_targets_of_make_lead_somewhere() -> None:
    rooms = ("docs", "src", "research", "examples", "benchmarks")
    targets = {*re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)}
    for page in (*ROOT.glob("*.md"), *(p for room in rooms for p in (ROOT / room).rglob("*.md"))):
        # the changelog tells of targets that went
        assert page.name == "CHANGELOG.md" or targets.issuperset(re.findall(r"`make ([a-z-]+)", page.read_text())), page
        for link in re.findall(r"\]\(([^)#:]*[^)#:.])(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_promise_names_its_test() -> None:
    """docs/reliability.md: each row names tests that exist, a target of make or a record; what works, functions."""
    page = (DOCS / "reliability.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("| ") and not re.match(r"\| (promise|what works) ", row)]
    works = page.partition("## What it works with")[2]
    assert len(rows) > 40
    for row in rows:
        folder = ROOT
        for name, test in re.findall(r"`(tests/[\w/.]+|test_\w+\.py)(?:::(\w+))?`", row):
            # a bare name stands beside the one before it
            path = ROOT / name if "/" in name else folder / name
            assert path.exists(), f"{name}: {row}"
            assert re.search(rf"^def {test}\(", path.read_text(), re.MULTILINE) if test else row not in works, row
            folder = path.parent
        assert folder != ROOT or "`make " in row or "(../benchmarks/results/" in row, row


def test_memory_table() -> None:
    rows = re.findall(r"^\| (fp32|bf16) \| (.+?) \| ([\d.]+) \|$", (DOCS / "lion.md").read_text(), re.MULTILINE)
    assert len(rows) == 7
    for dtype, what, told in rows:
        weight = torch.ones(2**16, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype], requires_grad=True)
        if "AdamW" in what:
            optimizer: torch.optim.Optimizer = torch.optim.AdamW([weight])
        else:
            call = re.search(r"`Lion(?:\((.*?)\))?`", what)
            assert call
            optimizer = Lion([weight], **eval(f"dict({call[1] or ''})"))
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        states = [value for value in optimizer.state[weight].values() if torch.is_tensor(value) and value.numel() > 100]
        assert f"{sum(value.nbytes for value in (weight, *states)) / weight.numel():.2f}" == told, what


def test_names_of_the_library_exist() -> None:
    for path in PAGES:
        for name in set(re.findall(r"`(onepass(?:\.\w+)+)", path.read_text())):
            assert pydoc.locate(name) is not None, name


def test_arguments_of_the_rivals_exist() -> None:
    colt5 = pytest.importorskip("colt5_attention")
    lion = pytest.importorskip("lion_pytorch")
    table = {
        lion.Lion: "lr weight_decay use_triton decoupled_weight_decay",
        colt5.coor_descent: "n_iters k eps eps_init eps_decay mask",
        colt5.topk: "k coor_descent_k_ratio n_iters eps",
        colt5.CoordinateDescentRouter: "num_routing_tokens straight_through eps n_iters fetch_k_ratio",
        colt5.ConditionalRoutedFeedForward: "num_heavy_tokens light_ff_mult heavy_ff_mult",
        colt5.ConditionalRoutedAttention: "num_heavy_tokens_q num_heavy_tokens_kv light_heads heavy_heads "
        "light_window_size heavy_dim_head",
        colt5.ConditionalRoutedCrossAttention: "num_tokens_q num_tokens_kv dim_head heads",
        colt5.ConditionalRoutedTransformerBlock: "num_heavy_attn_tokens_q num_heavy_attn_tokens_kv num_heavy_ff_tokens",
    }
    page = (DOCS / "moving.md").read_text()
    for call, names in table.items():
        has = inspect.signature(call).parameters
        for name in names.split():
            assert name in has, f"{call} has no {name}"
            assert name in page

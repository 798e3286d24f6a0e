"""Every program of examples/ runs in another directory, says what it promises, and stays short."""

from __future__ import annotations

import functools
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NEEDS = {
    "hf_trainer": ("transformers", "accelerate"), "lightning_module": ("lightning",), "choose_features": ("sklearn",),
    "long_documents": (), "gpt": (), "mixture_of_depths": (), "fsdp2": (), "sparse_attention": (),
    "sparse_autoencoder": (), "mixture_of_experts": (),
}  # fmt: skip
# an experiment of six arms
LINES = {"sparse_attention": 180}


def output(name: str, folder: Path, *launcher: str, options: Sequence[str] = ()) -> str:
    """Run an example as its user would, in another directory, where it leaves nothing; return what it printed."""
    if missing := [package for package in NEEDS[name] if find_spec(package) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    path = os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), *options]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=environment, timeout=200
    )
    assert list(folder.iterdir()) == []
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    found = re.search(pattern, text)
    assert found, text
    return [float(number) for number in found.groups()]


def test_all_programs_are_listed_and_short() -> None:
    programs = {path.stem: path.read_text(encoding="utf-8") for path in EXAMPLES.glob("*.py")}
    assert programs.keys() == NEEDS.keys()
    assert [name for name, text in programs.items() if len(text.splitlines()) > LINES.get(name, 80)] == []
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"({path.name})" in readme for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))


@pytest.mark.slow
def test_hf_trainer(tmp_path: Path) -> None:
    said = output("hf_trainer", tmp_path)
    assert "exchanged  5  transformers.models.llama.modeling_llama.LlamaRMSNorm -> onepass.nn.RMSNorm" in said
    first, last = numbers(r"loss ([\d.]+) to ([\d.]+)", said)
    assert last < first - 0.5
    assert numbers(r"differ by ([\d.e+-]+)", said)[0] < 1e-4


@pytest.mark.slow
def test_lightning_module(tmp_path: Path) -> None:
    said = output("lightning_module", tmp_path)
    first, last = numbers(r"error ([\d.]+) to ([\d.]+)", said)
    assert last < first / 4
    first, last = numbers(r"hard tokens ([\d.]+) to ([\d.]+)", said)
    assert last > max(first, 0.5)


@pytest.mark.slow
def test_long_documents(tmp_path: Path) -> None:
    first, last = numbers(r"accuracy ([\d.]+) to ([\d.]+)", output("long_documents", tmp_path))
    assert first < 0.5 < 0.7 < last


@pytest.mark.slow
def test_gpt(tmp_path: Path) -> None:
    said = output("gpt", tmp_path, options=("--steps", "150"))
    bits = [float(found) for found in re.findall(r"([\d.]+) bits a byte", said)]
    # a blind guess has 8 bits
    assert len(bits) == 3
    assert bits[2] < min(bits[0] - 1, 3.5)
    assert "\ndef " in said


@pytest.mark.slow
def test_mixture_of_depths(tmp_path: Path) -> None:
    found = dict(re.findall(r"^(.+?) +([\d.]+) bits a byte$", output("mixture_of_depths", tmp_path), re.MULTILINE))
    assert found.keys() == {"auxiliary", "threshold", "dense, 3 blocks", "dense, 4 blocks"}
    # a blind guess has 8 bits
    assert max(map(float, found.values())) < 5.5


def test_mixture_of_depths_compares_equal_products_and_looks_at_no_later_byte() -> None:
    from examples.mixture_of_depths import DENSE, N, Skipped, build

    def flops(model: nn.Module) -> int:
        # the counter knows the products of this way to attend alone
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model.train()(torch.zeros(1, N, dtype=torch.int64))
        return int(counter.get_total_flops())

    def chosen(model: nn.Sequential, tokens: Tensor) -> Tensor:
        model(tokens)
        places = torch.arange(tokens.shape[1])
        return torch.stack([(b.indices[:, None] == places[:, None]).any(-1) for b in model if isinstance(b, Skipped)])

    models = {name: build(name) for name in ("auxiliary", "threshold", *DENSE)}
    counts = {name: flops(model) for name, model in models.items()}
    assert max(counts.values()) < 1.005 * min(counts.values())
    tokens = torch.randint(256, (2, N))
    other = torch.cat([tokens[:, : N // 2], torch.randint(256, (2, N - N // 2))], 1)
    for name, model in models.items():
        model.eval()
        torch.testing.assert_close(model(tokens)[:, : N // 2], model(other)[:, : N // 2], rtol=1e-4, atol=1e-5)
        if name in DENSE:
            continue
        # the choice of training looks ahead with "auxiliary" alone
        looked = [chosen(model.train(), batch)[..., : N // 2] for batch in (tokens, other)]
        assert torch.equal(*looked) == (name == "threshold")


@pytest.mark.slow
def test_choose_features(tmp_path: Path) -> None:
    accuracies = [float(found) for found in re.findall(r"accuracy ([\d.]+)", output("choose_features", tmp_path))]
    assert len(accuracies) == 7
    assert min(accuracies) > 0.85


@pytest.mark.slow
def test_fsdp2(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    said = output("fsdp2", tmp_path, *launcher)
    through, resumed = numbers(r"through ([\d.]+), from the checkpoint ([\d.]+)", said)
    assert through == resumed
    assert through < numbers(r"step 10  loss ([\d.]+)", said)[0]


@pytest.mark.slow
def test_sparse_attention(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    record = tmp_path_factory.mktemp("record") / "found.json"
    said = output("sparse_attention", tmp_path, options=("--steps", "10", "--out", str(record)))
    found = re.findall(r"^(\w+) +([\d.]+) bits per byte .* weight ([\d.]+) of at most ([\d.]+)$", said, re.MULTILINE)
    assert [arm for arm, *_ in found] == ["full", "window", "untrained", "distil", "gates", "both"]
    # 8 bits per byte is a guess without knowledge
    assert all(2 < float(bits) < 6 and float(chosen) <= float(best) for _, bits, chosen, best in found)
    weight = {arm: float(chosen) for arm, _, chosen, _ in found}
    assert weight["distil"] > weight["untrained"]
    rows = json.loads(record.read_text())["rows"]
    assert [(row["arm"], f"{row['bits']:.3f}") for row in rows] == [(arm, bits) for arm, bits, *_ in found]


@pytest.mark.parametrize("arm", ["window", "untrained", "distil", "gates", "both"])
def test_sparse_attention_to_all_tokens_is_full_attention(arm: str) -> None:
    """With its gradients; to k tokens it is full attention to those that its scores choose, and to no later one."""
    from examples.sparse_attention import SparseAttention

    def layer(arm: str, k: int) -> SparseAttention:
        torch.manual_seed(0)
        return SparseAttention(16, 2, k, arm).double()

    # full attention's weights are fp32 in the layer, and so are the cosines
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    n, k = 13, 4
    x = torch.randn(2, n, 16, dtype=torch.float64, requires_grad=True)
    full, all_seen, few = layer("full", n), layer(arm, n + 1), layer(arm, k)
    found = [(m, m(x)[0]) for m in (all_seen, full)]
    close(*(y for _, y in found))
    close(*(torch.autograd.grad(y.square().sum(), (x, m.qkv.weight, m.out.weight)) for m, y in found))
    y, loss, _ = few(x)
    close(few(x[:, :-3])[0], y[:, :-3])
    distils = arm in ("distil", "both")
    if distils:
        trained = (x, few.qkv.weight, few.indexer.weight)
        of_loss = torch.autograd.grad(loss, trained, allow_unused=True, retain_graph=True)
        assert [g is not None and bool(g.any()) for g in of_loss] == [False, False, True]
        close(few(torch.cat((x, x)))[1], loss)
    of_y = torch.autograd.grad(y.sum(), few.indexer.weight, allow_unused=True)[0]
    assert (of_y is not None and bool(of_y.any())) == (arm in ("gates", "both"))
    # angles are of distances: the last k tokens alone give the same
    few.scores = lambda x: torch.arange(float(n)).to(x).expand(len(x), n, n)  # type: ignore[method-assign]
    y, _, mass = few.eval()(x)
    close(y[:, k - 1 :], torch.stack([full(x[:, t - k : t])[0][:, -1] for t in range(k, n + 1)], 1))
    assert 0 < mass[0] < mass[1]
    if distils:
        few.qkv.weight.data.zero_()
        few.scores = lambda x: x.new_zeros(len(x), n, n)  # type: ignore[method-assign]
        close(few(x)[1], torch.zeros(()))


@pytest.mark.slow
def test_the_notebook_runs() -> None:
    for package in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(package)
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(EXAMPLES / "gates.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 2
    assert "scores with a gradient" in json.dumps(outputs)


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = json.loads((EXAMPLES / "gates.ipynb").read_text())["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--batch",)])
def test_sparse_autoencoder(tmp_path: Path, flags: tuple[str, ...]) -> None:
    said = output("sparse_autoencoder", tmp_path, options=("--steps", "61", *flags))
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", said)]
    assert losses[-1] < 0.6 * losses[0]


def test_a_sparse_autoencoder_keeps_the_first_of_equals_and_reaches_dead_latents() -> None:
    autoencoder = runpy.run_path(str(EXAMPLES / "sparse_autoencoder.py"))["SparseAutoencoder"]
    model = autoencoder(8, 32, 3)
    latents = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, -1.0]])
    model.decoder.data = torch.eye(6)
    assert model.decode(latents, 3)[0].tolist() == [[0.0, 2.0, 1.0, 1.0, 0.0, 0.0]]
    model = autoencoder(8, 32, 3)
    model.unused[5:] = 1000
    model(torch.randn(4, 8))[1].backward()
    assert model.decoder.grad[5:].any()


@pytest.mark.slow
def test_mixture_of_experts(tmp_path: Path) -> None:
    rows = re.findall(r"^(\w[a-z ]*?) +([\d.]+) +([\d.]+)$", output("mixture_of_experts", tmp_path), re.MULTILINE)
    found = {name: (float(error), float(busiest)) for name, error, busiest in rows}
    assert found.keys() == {"dense", "no balance", "balanced"}
    assert found["balanced"][0] < 0.8 * found["dense"][0]
    assert found["balanced"][1] < 1.2 < 1.5 < found["no balance"][1]  # four seeds: 1.02 to 1.11, 1.94 to 3.36

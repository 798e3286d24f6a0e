"""hub/build.py: the repository for the Hugging Face kernels hub, and what its library makes of it."""

from __future__ import annotations

import ast
import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass
from hub import build

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hub") / "repository"
    build.write(out)
    return out


@pytest.fixture(scope="module")
def loaded(repository: Path) -> ModuleType:
    kernels = pytest.importorskip("kernels")
    return kernels.get_local_kernel(repository, backend="cpu")


def test_files(repository: Path) -> None:
    """Nothing imports what is not there, or onepass by name; nothing is there that operators don't import."""
    variants = sorted((repository / "build").iterdir())
    assert [v.name for v in variants] == ["torch-cpu", "torch-cuda"]
    for variant in variants:
        files = {p.relative_to(variant).as_posix() for p in variant.rglob("*.py")}
        assert {"__init__.py", "layers.py", "core/register.py", "ops/norm/op.py"} <= files
        assert not any(name.startswith(("nn/", "bench/", "train/")) or "spec" in name for name in files)
        for name in files:
            for node in ast.walk(ast.parse((variant / name).read_text())):
                if isinstance(node, ast.Import):
                    found = [alias.name.partition(".")[0] for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    found = [str(node.module).partition(".")[0]]
                elif isinstance(node, ast.ImportFrom):
                    folder = (variant / name).parents[node.level - 1]
                    inside = folder.joinpath(*(node.module or "").split(".")) if node.module else folder
                    found = []
                    assert inside.is_dir() or inside.with_suffix(".py").is_file(), (name, node.module)
                else:
                    continue
                assert set(found) <= {"torch", "triton", *sys.stdlib_module_names}, name
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["id"].isidentifier()
        assert set(metadata["digest"]["files"]) == files
    assert (repository / "README.md").is_file()


def test_ids_follow_from_the_contents(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ids(out: Path) -> list[str]:
        return [json.loads((f / "metadata.json").read_text())["id"] for f in sorted((out / "build").iterdir())]

    build.write(tmp_path / "again")
    assert ids(tmp_path / "again") == ids(repository)
    assert len(set(ids(repository))) == 2
    found = build.sources()
    monkeypatch.setattr(build, "sources", lambda: {**found, "layers.py": found["layers.py"] + "\n"})
    build.write(tmp_path / "other")
    assert not set(ids(tmp_path / "other")) & set(ids(repository))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("from onepass.core import check\n", "from ...core import check\n"),
        ("from onepass.ops._shared.x import (\n    y,\n)\n", "from ...ops._shared.x import (\n    y,\n)\n"),
        ("from onepass import swap\n", "from ... import swap\n"),
        ("def f():\n    from onepass.core import a\n", "def f():\n    from ...core import a\n"),
        ("from onepass_of_others import a\nfrom . import b\n", "from onepass_of_others import a\nfrom . import b\n"),
    ],
)
def test_relative(text: str, want: str) -> None:
    assert build.relative(text, 2) == want


@pytest.mark.parametrize(
    "text", ["import onepass\n", "import os, onepass.core as c\n", "from \\\n  onepass.core import a\n"]
)
def test_what_cannot_be_relative(text: str) -> None:
    with pytest.raises(ValueError, match=r"write `from onepass|on a line of another"):
        build.relative(text, 1)


@pytest.mark.parametrize("file", ["thesis.txt", "build/thesis.txt", "build/lib/thesis.txt"])
def test_a_folder_of_others_is_left(tmp_path: Path, file: str) -> None:
    """Also one with a build folder, as the top of every project has."""
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("mine")
    command = [sys.executable, str(ROOT / "hub" / "build.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    name = "/".join(Path(file).parts[:2])
    assert done.stderr == f"hub: {tmp_path} has {name}, which this program does not make; name another folder\n"
    assert (tmp_path / file).read_text() == "mine"


@pytest.mark.slow
def test_metadata_by_the_library(repository: Path) -> None:
    """It accepts the metadata, picks a variant for each backend, and computes the digests that stand there."""
    pytest.importorskip("kernels")
    from kernels._rust import Digest, DigestAlgorithm, Metadata
    from kernels.resolver import resolve_local_kernel

    for backend in ("cpu", "cuda"):
        folder = repository / "build" / f"torch-{backend}"
        metadata = Metadata.read_from_file(folder / "metadata.json")
        assert (metadata.name.python_name, metadata.version) == ("onepass", 0)
        assert metadata.digest is not None
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, folder))
    assert resolve_local_kernel(repository, backend="cpu").variant_path.name == "torch-cpu"


@pytest.mark.slow
def test_functions_and_gradients(loaded: ModuleType) -> None:
    """Those of the installed package, bit for bit, while it is imported; the operators are others."""
    assert loaded.rms_norm is not onepass.rms_norm
    assert set(loaded.__all__) - {"layers"} <= set(onepass.__all__)
    x, r, w = torch.randn(4, 16), torch.randn(4, 16), torch.randn(16)
    calls: dict[str, Any] = {
        "rms_norm": lambda m, x: m.rms_norm(x, w, residual=r)[0],
        "layer_norm": lambda m, x: m.layer_norm(x, w, w),
        "weighted_sum": lambda m, x: m.weighted_sum(x, w),
        "soft_topk": lambda m, x: m.soft_topk(x, 3),
        "coor_descent": lambda m, x: m.coor_descent(x, n_iters=5, k=3),
        "topk": lambda m, x: m.topk(x, 3).gates,
        "qk_norm_rope": lambda m, x: m.qk_norm_rope(
            x.view(1, 4, 1, 16), x.view(1, 4, 1, 16), w, w, cos=r[:, :8], sin=r[:, 8:]
        )[0],
    }
    for call in calls.values():
        outs = []
        for module in (onepass, loaded):
            t = x.clone().requires_grad_()
            y = call(module, t)
            outs.append((y, torch.autograd.grad(y.square().sum(), t)[0]))
        assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
    # the dispatcher's operators: registered under the module's own name
    name = loaded.__name__
    assert hasattr(getattr(torch.ops, name), "soft_topk")
    program = torch.compile(lambda t: loaded.soft_topk(t, 3), fullgraph=True, backend="eager")
    assert torch.equal(program(x), onepass.soft_topk(x, 3))


@pytest.mark.slow
def test_two_versions_beside_the_package(repository: Path, tmp_path: Path) -> None:
    """In one process, in both orders; each has operators of its own."""
    pytest.importorskip("kernels")
    other = tmp_path / "other"
    shutil.copytree(repository, other)
    metadata = other / "build" / "torch-cpu" / "metadata.json"
    metadata.write_text(metadata.read_text().replace("_onepass_cpu_", "_onepass_cpu_0"))
    code = f"""
import sys
from pathlib import Path
import torch
from kernels import get_local_kernel
if "first" in sys.argv:
    import onepass
kernels = [get_local_kernel(Path(p), backend="cpu") for p in ({str(repository)!r}, {str(other)!r})]
import onepass
x = torch.randn(3, 8)
calls = [lambda t, m=m: m.soft_topk(t, 2) for m in (*kernels, onepass)]
outs = [torch.compile(call, fullgraph=True, backend="eager")(x) for call in calls]
assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
names = {{m.__name__ for m in (*kernels, onepass)}}
assert len(names) == 3 and all(hasattr(torch.ops, n) for n in names)
"""
    for order in ("first", "last"):
        done = subprocess.run([sys.executable, "-c", code, order], capture_output=True, text=True, check=False,
                              env={**os.environ, "PYTHONPATH": str(ROOT / "src")})  # fmt: skip
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_kernels_themselves(repository: Path) -> None:
    """Triton's kernels of the loaded folder, under the interpreter, without the package at hand."""
    pytest.importorskip("kernels")
    pytest.importorskip("triton")
    code = f"""
import sys
from pathlib import Path
import torch
from kernels import get_local_kernel
m = get_local_kernel(Path({str(repository)!r}), backend="cpu")
x, w = torch.randn(3, 20, requires_grad=True), torch.randn(20)
y = m.rms_norm(x, w)
torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (20,), w, 1e-6))
y.sum().backward()
assert m.soft_topk(x.detach(), 2).sum(-1).allclose(torch.tensor(2.0), atol=1e-4)
assert "onepass" not in sys.modules
assert any(n.endswith("kernels_triton") for n in sys.modules), "torch computed"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=repository,
                          env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ""})  # fmt: skip
    assert done.returncode == 0, done.stderr


class Norms(nn.Module):
    """Norms that the library may exchange, and linear layers between them."""

    def __init__(self, kinds: dict[str, type[nn.Module]]) -> None:
        super().__init__()
        self.a = kinds["LayerNorm"]((3, 8), eps=1e-3)
        self.b = kinds["RMSNorm"](8)
        self.c = kinds["RMSNorm"]((3, 8), eps=1e-3)
        self.d = kinds["LayerNorm"](8, bias=False)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.linear(self.c(self.linear(self.b(self.linear(self.a(x)))))))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_kernelize(repository: Path, compiled: bool) -> None:
    kernels = pytest.importorskip("kernels")
    kinds = {
        name: kernels.use_kernel_forward_from_hub(name)(type(name, (getattr(nn, name),), {}))
        for name in ("LayerNorm", "RMSNorm")
    }
    plain = Norms(kinds)
    for p in plain.parameters():
        nn.init.normal_(p)
    model = copy.deepcopy(plain)
    mapping = {n: {"cpu": kernels.LocalLayerRepository(repository, layer_name=n)} for n in kinds}
    mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
    with kernels.use_kernel_mapping(mapping):
        kernels.kernelize(model, mode=mode, device="cpu", use_fallback=False)
    assert all("_onepass_cpu" in m.forward.__func__.__module__ for m in (model.a, model.b, model.c, model.d))
    program = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    x = torch.randn(2, 3, 8, requires_grad=True)
    torch.testing.assert_close(program(x), plain(x))
    grads = [torch.autograd.grad(m(x).sin().sum(), [x, *m.parameters()]) for m in (model, plain)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layer"), [("Llama", "LlamaRMSNorm"), ("Gemma", "GemmaRMSNorm")])
def test_kernelize_a_model_of_transformers(repository: Path, name: str, layer: str) -> None:
    """Their norms carry the library's name RMSNorm; the logits have the same bits."""
    kernels = pytest.importorskip("kernels")
    transformers = pytest.importorskip("transformers")
    norm = getattr(__import__(f"transformers.models.{name.lower()}.modeling_{name.lower()}", fromlist=["x"]), layer)
    if not hasattr(norm, "kernel_layer_name"):
        kernels.replace_kernel_forward_from_hub(norm, "RMSNorm")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2}  # fmt: skip
    config = getattr(transformers, f"{name}Config")(vocab_size=64, head_dim=8, **sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    ids = torch.arange(12).view(2, 6)
    want = model(ids).logits
    repo = kernels.LocalLayerRepository(repository, layer_name=layer)
    with kernels.use_kernel_mapping({norm.kernel_layer_name: {"cpu": repo}}, inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu")
    assert "_onepass_cpu" in model.model.norm.forward.__func__.__module__
    torch.testing.assert_close(model(ids).logits, want, rtol=0.0, atol=64 * 30 * torch.finfo(torch.float32).eps)


@pytest.mark.gpu
def test_on_a_gpu(repository: Path) -> None:
    """The CUDA variant: its kernels give the package's bits, and a kernelized norm runs and trains."""
    kernels = pytest.importorskip("kernels")
    loaded = kernels.get_local_kernel(repository)
    assert loaded.__name__.startswith("_onepass_cuda_")
    x, w = torch.randn(64, 1024, device="cuda").bfloat16(), torch.randn(1024, device="cuda")
    outs = []
    for module in (onepass, loaded):
        t = x.clone().requires_grad_()
        y, s = module.rms_norm(t, w, residual=x)
        gates = module.soft_topk(t.float(), 32)
        outs.append((y, s, gates, torch.autograd.grad(y.float().square().sum() + gates.square().sum(), t)[0]))
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
    norm = kernels.use_kernel_forward_from_hub("RMSNorm")(type("RMSNorm", (nn.RMSNorm,), {}))(1024).cuda()
    want = norm(x.float())
    repo = kernels.LocalLayerRepository(repository, layer_name="RMSNorm")
    with kernels.use_kernel_mapping({"RMSNorm": {"cuda": repo}}):
        kernels.kernelize(norm, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, use_fallback=False)
    torch.testing.assert_close(norm(x.float()), want, rtol=1e-5, atol=1e-5)

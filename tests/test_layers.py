"""The package's shape: one-way imports, no effect of importing, each heavy library in one place."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "distill"

# A module imports only from layers before its own.
LAYERS = [
    {"errors", "types", "config"},
    {
        "records",
        "files",
        "lock",
        "dataset",
        "tokenizer",
        "head",
        "losses",
        "collate",
        "steps",
        "optim",
        "workers",
        "models",
        "placement",
        "adapters",
    },
    {"fused", "merge"},
    {"teacher", "student", "codec", "cache", "checkpoint"},
    {"dataloader", "evaluate", "report", "scoring", "progress"},
    {"collect", "train", "teachers", "parts"},
    {"ancestor", "making"},
    {"sharing"},
    {"splits", "runs", "journal"},
    {"prepare"},
    {"planning"},
    {"filling", "pruning", "rebase", "cacheverbs", "allowance"},
    {"rounds"},
    {"pipeline", "command", "sweep"},
    {"cli"},
]
LAYER_OF = {module: number for number, layer in enumerate(LAYERS) for module in layer}
# Within a layer these few may import each other, in this direction only.
WITHIN = {
    ("runs", "journal"), ("lock", "files"), ("models", "files"), ("models", "placement"), ("tokenizer", "files"),
    ("types", "errors"), ("config", "errors"), ("cache", "codec"),
}  # fmt: skip
HEAVY = {
    "h5py": "cache", "wandb": "report", "safetensors": "checkpoint", "datasets": "dataset", "pyarrow": "dataset",
}  # fmt: skip


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def module_name(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            if node.module == "distill":
                names |= {f"distill.{alias.name}" for alias in node.names}
    return names


def test_every_module_has_its_layer() -> None:
    assert {module_name(path) for path in modules()} == set(LAYER_OF)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    own = module_name(path)
    for name in imported(path):
        if not name.startswith("distill.") or name == "distill.__version__":
            continue
        other = name.split(".")[1]
        allowed = other == own or LAYER_OF[other] < LAYER_OF[own] or (own, other) in WITHIN
        assert allowed, f"{own} imports {other}"


@pytest.mark.parametrize(("library", "home"), HEAVY.items())
def test_a_heavy_library_has_one_home(library: str, home: str) -> None:
    users = {module_name(path) for path in modules() if any(n.split(".")[0] == library for n in imported(path))}
    assert home in users and users <= {home, "models"}, f"{library} is imported in {users}"


def test_no_pickle_or_print_outside_their_places() -> None:
    for path in modules():
        if module_name(path) not in {"workers", "report"}:
            assert "pickle" not in imported(path), path
        if module_name(path) not in {"report", "cli"}:
            calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
            assert not any(isinstance(c.func, ast.Name) and c.func.id == "print" for c in calls), path


def test_importing_everything_changes_nothing() -> None:
    """No environment writes, no output, no threads, no CUDA."""
    names = sorted({"distill." + module_name(path) for path in modules()})
    code = (
        "import os, threading, sys\n"
        "import torch, transformers, h5py\n"
        "before = dict(os.environ)\n"
        f"for name in {names}: __import__(name)\n"
        "assert dict(os.environ) == before\n"
        "assert threading.active_count() == 1\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

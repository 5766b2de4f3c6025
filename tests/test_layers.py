"""Who may import whom: core <- engine <- drafters <- training <- triton, and the client stands alone."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BACKEND = ROOT / "backend" / "angelspec_backend"
CLIENT = ROOT / "client" / "angelspec_client"

LAYERS = ["core", "engine", "drafters", "training", "triton"]  # each may import those before it
THIRD_PARTY = {
    "core": {"numpy", "pydantic", "yaml"},
    "engine": {"numpy", "torch", "transformers", "safetensors", "triton"},  # the language, not the server
    "drafters": {"numpy", "torch", "transformers", "safetensors", "huggingface_hub", "pydantic"},
    "training": {"numpy", "torch", "transformers", "jinja2", "pydantic", "yaml", "rich", "matplotlib"},
    "triton": {"numpy", "torch", "transformers", "jinja2", "triton_python_backend_utils"},
    "client": {"numpy", "tritonclient", "typer", "rich", "grpc"},
}


def imports(path: Path, package: tuple[str, ...]) -> set[tuple[str, ...]]:
    """Absolute names of all modules a file imports, those inside functions included.

    package: the names of the package the file lies in, which relative imports start from.
    """
    found: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            # `from package import module` names a module too.
            found |= {(*base, alias.name) for alias in node.names}
    return found


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_layers_below_and_its_own_libraries(layer):
    below = {*LAYERS[: LAYERS.index(layer) + 1]}
    assert files(BACKEND / layer)
    for path in files(BACKEND / layer):
        package = path.relative_to(BACKEND.parent).parent.parts
        for name in imports(path, package):
            if name[0] == "angelspec_backend":
                assert name[1] in below, f"{path.name}: {'.'.join(name)}"
            else:
                allowed = name[0] in sys.stdlib_module_names or name[0] in THIRD_PARTY[layer]
                assert allowed, f"{path.name}: {'.'.join(name)}"


def test_the_client_needs_nothing_of_the_server():
    for path in files(CLIENT):
        package = path.relative_to(CLIENT.parent).parent.parts
        for name in imports(path, package):
            allowed = {"angelspec_client"} | THIRD_PARTY["client"]
            assert name[0] in sys.stdlib_module_names or name[0] in allowed, f"{path.name}: {'.'.join(name)}"


def test_the_public_model_starts_without_torch():
    seen: set[tuple[str, ...]] = set()
    for path in files(BACKEND / "triton"):
        if path.stem not in ("target_model", "drafter_model", "device_states"):
            seen |= imports(path, ("angelspec_backend", "triton"))
    own = {name[1:3] for name in seen if name[0] == "angelspec_backend"}
    assert not {("triton", "target_model"), ("triton", "drafter_model")} & own
    assert not {"engine", "drafters", "training"} & {name[0] for name in own}
    assert "torch" not in {name[0] for name in seen}


def test_shims_import_one_class():
    for path in (ROOT / "model_repository").glob("*/1/model.py"):
        assert len(path.read_text().strip().splitlines()) == 1

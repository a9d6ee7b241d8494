"""Who may import whom, and what must not be loaded for a help page."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = {
    "version": 0,
    "errors": 0,
    "options": 0,
    "registry": 0,
    "sampler_names": 0,
    "data": 0,
    "memory": 0,
    "folders": 0,
    "ggml_types": 1,
    "gguf_header": 1,
    "gguf_file": 1,
    "quant": 1,
    "pretokenizer": 1,
    "byte_pair": 1,
    "sentencepiece": 1,
    "vocabulary": 1,
    "tokenizer": 1,
    "template_sandbox": 1,
    "chat": 1,
    "kv_cache": 1,
    "resources": 1,
    "models": 2,
    "native": 2,
    "sampling": 2,
    "drafters": 3,
    "verify": 4,
    "generate": 4,
    "stats": 4,
    "stops": 4,
    "trace": 5,
    "session": 5,
    "engine": 5,
    "describe": 5,
    "describe_draft": 5,
    "check": 6,
    "hints": 6,
    "bench": 6,
    "train": 7,
    "evaluation": 8,
}
"""Top-level module or package of specdec -> layer; a module imports from its own layer or below."""
MODULES = sorted((ROOT / "specdec").rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Dotted names of the specdec modules that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_only_from_layers_below(path: Path) -> None:
    parts = path.relative_to(ROOT / "specdec").with_suffix("").parts
    if parts == ("__init__",):
        return
    own = LAYERS[parts[0]]
    for name in imports(path):
        assert not name.startswith(("specdec_cli", "cli", "typer", "rich")), name
        top = name.split(".")
        if top[0] == "specdec" and len(top) > 1 and top[1] in LAYERS:
            assert LAYERS[top[1]] <= own, f"{path.name} (layer {own}) imports {name}"


def test_every_package_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in MODULES
        if path.name == "__init__.py"
    }
    listed = set(project["tool"]["setuptools"]["packages"])
    assert {name for name in listed if name.startswith("specdec.")} | {"specdec"} == found


def loaded(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after ``code``."""
    program = f"import sys\n{code}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(result.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("import specdec", {"typer", "rich", "torch", "gguf"}),
        ("import specdec.options, specdec.gguf_file", {"torch", "gguf", "typer", "rich"}),
        ("import specdec.tokenizer, specdec.chat", {"torch", "typer", "rich"}),
        ("import specdec_cli.main as m; m.run(['--version'])", {"torch", "gguf", "numpy"}),
        ("import specdec_cli.main as m; m.run(['generate', '--help'])", {"torch", "gguf"}),
        ("import specdec_cli.main as m; m.run(['generate', '--bogus'])", {"torch", "gguf"}),
        ("import specdec_cli.main as m; m.run(['generate', '-m', 'x', '-n', 'y'])", {"torch"}),
        ("import specdec_cli.main as m; m.run(['train', '--help'])", {"torch", "gguf"}),
        ("import specdec_cli.main as m; m.run(['train', '-m', 'x'])", {"torch", "gguf"}),
        (
            "import specdec_cli.main as m; m.run(['train', '-m', 'x', '-o', 'no/x.gguf'])",
            {"torch", "gguf"},
        ),
        ("import specdec_cli.main as m; m.run(['eval', '-m', 'x'])", {"torch", "gguf"}),
        ("import specdec.engine", {"typer", "rich"}),
    ],
)
def test_light_commands_stay_light(code: str, unwanted: set[str]) -> None:
    assert not loaded(code) & unwanted


@pytest.mark.parametrize("draft", ["dft2.gguf", "dspark_anchor.gguf", "eagle3_wide.gguf"])
def test_loading_does_not_wake_the_compiler(draft: str) -> None:
    """Importing torch's compiler takes two seconds, and nothing here needs it."""
    vectors = ROOT / "tests" / "data" / "vectors"
    code = (
        "import sys; from specdec.engine import Engine; from specdec.options import Options;"
        f"Engine.load(Options().merge({{'model.path': {str(vectors / 'tgt_qwen3.gguf')!r}, "
        f"'model.kernels': 'torch', 'spec.draft.path': {str(vectors / draft)!r}}}));"
        "print('torch._dynamo' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split()[-1:] == ["False"], result.stderr

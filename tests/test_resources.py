"""Files and devices that options name: downloads, sidecars, device names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny

from specdec import resources
from specdec.errors import ModelFileError, UsageError
from specdec.options import DraftOptions, ModelOptions, Options

NAMES = [
    "README.md",
    "b-Q8_0.gguf",
    "b-q4_k_m.gguf",
    "mmproj-b.gguf",
    "dflash-b.gguf",
    "mtp-b.gguf",
]


@pytest.mark.parametrize(
    ("quant", "first", "expected"),
    [
        ("Q4_K_M", (), "b-q4_k_m.gguf"),
        ("q8_0", (), "b-Q8_0.gguf"),
        ("F16", (), "b-Q8_0.gguf"),
        ("Q4_K_M", ("mtp-", "dflash-"), "mtp-b.gguf"),
        ("Q4_K_M", ("eagle3-", "dflash-"), "dflash-b.gguf"),
        ("Q8_0", ("eagle3-",), "b-Q8_0.gguf"),
    ],
)
def test_which_file_of_a_repository(quant: str, first: tuple[str, ...], expected: str) -> None:
    assert resources.pick_file(NAMES, quant, first) == expected


def test_a_repository_without_models() -> None:
    with pytest.raises(ValueError, match="no GGUF file"):
        resources.pick_file(["mmproj-x.gguf", "config.json"], "Q4_K_M")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """A stand-in for huggingface_hub; returns what was downloaded."""
    asked: list[tuple[str, str]] = []
    path = tiny.write_target(tmp_path / "model.gguf")

    def hf_hub_download(repo: str, name: str, *, token: str | None, local_files_only: bool) -> str:
        asked.append((repo, name))
        (tmp_path / name).write_bytes(path.read_bytes())
        return str(tmp_path / name)

    def list_repo_files(repo: str, *, token: str | None) -> list[str]:
        if repo == "no/network":
            raise RuntimeError("no route\nto host")
        return NAMES

    module = SimpleNamespace(hf_hub_download=hf_hub_download, list_repo_files=list_repo_files)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return asked


def test_repositories(hub: list[tuple[str, str]]) -> None:
    options = Options().merge({"model.hf_repo": "a/b:Q8_0"})
    resources.open_target(options).close()
    assert resources.open_draft(options) is None
    assert resources.open_draft(options.merge({"spec.types": ("draft-eagle3",)})) is None
    for layer in (
        {"spec.types": ("draft-dflash2",)},
        {"spec.draft.hf_repo": "c/d"},
        {"spec.draft.hf_repo": "c/d", "spec.draft.path": Path("x.gguf")},
    ):
        draft = resources.open_draft(options.merge(layer))
        assert draft is not None
        draft.close()
    assert hub == [
        ("a/b", "b-Q8_0.gguf"),
        ("a/b", "b-Q8_0.gguf"),
        ("a/b", "dflash-b.gguf"),
        ("c/d", "mtp-b.gguf"),
        ("c/d", "x.gguf"),
    ]


def test_a_failed_download_is_one_line(hub: list[tuple[str, str]]) -> None:
    with pytest.raises(ModelFileError, match=r"--hf-repo no/network: no route$"):
        resources.open_target(Options().merge({"model.hf_repo": "no/network"}))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r"pip install 'specdec\[hub\]'"):
        resources.open_target(Options().merge({"model.hf_repo": "a/b"}))


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr(resources, "cache_folder", lambda: cache)
    path = tiny.write_target(tmp_path / "model.gguf")
    with pytest.raises(UsageError, match="--offline was given"):
        resources.download_url(path.as_uri(), offline=True)
    with pytest.raises(ModelFileError, match="--model-url"):
        resources.download_url((tmp_path / "nothing.gguf").as_uri(), offline=False)
    options = Options().merge({"model.url": path.as_uri()})
    resources.open_target(options).close()
    path.unlink()
    resources.open_target(options).close()
    assert [one.name for one in cache.iterdir()] == ["model.gguf"]
    assert ("model.gguf", (cache / "model.gguf").stat().st_size) in resources.cached_models()


def test_devices(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(resources, "devices", lambda: ["cpu", "cuda:1", "cuda:0"])

    def device(draft: DraftOptions | None = None, **values: object) -> str:
        return str(resources.pick_device(ModelOptions(**values), draft))  # type: ignore[arg-type]

    assert device() == "cuda:0"
    assert device(main_gpu=1) == "cuda:1"
    assert device(n_gpu_layers="0") == device(device="none") == "cpu"
    assert device(device="CUDA1") == "cuda:1"
    assert device(DraftOptions(device="cpu"), device="cuda:0") == "cpu"
    assert device(DraftOptions(n_gpu_layers="0")) == "cpu"
    assert not caplog.records
    assert device(device="cuda:1,cuda:0") == "cuda:1"
    assert "a model lies on one device; using cuda:1" in caplog.text
    assert device(n_gpu_layers="7") == "cuda:0"
    assert "--gpu-layers 7: the whole model goes to the accelerator" in caplog.text
    with pytest.raises(UsageError, match="--main-gpu: unknown device: cuda:2"):
        device(main_gpu=2)
    monkeypatch.setattr(resources, "devices", lambda: ["cpu"])
    assert device(n_gpu_layers="all") == "cpu"
    assert "--gpu-layers all: no usable GPU" in caplog.text


@pytest.mark.parametrize("n", [resources.MOST_THREADS * 1000, 2**31 - 1])
def test_more_threads_than_anybody_means(n: int) -> None:
    with pytest.raises(UsageError, match=f"--threads {n}: more than"):
        resources.set_threads(n)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_one_thread_is_one_thread(tmp_path: Path, kernels: str) -> None:
    """`--threads` counts for torch and for the kernels: with one, no thread is ever started."""
    model = tiny.write_target(tmp_path / "target.gguf", n_layer=3)
    script = (
        "import os, torch; from pathlib import Path\n"
        "from specdec.engine import Engine; from specdec.options import Options\n"
        "def count(): return len(os.listdir('/proc/self/task'))\n"
        "def started(n):\n"
        f"    names = {{'model.path': Path({str(model)!r}), 'model.kernels': {kernels!r}}}\n"
        "    before = count()\n"
        "    options = Options().merge(names | {'model.n_threads': n})\n"
        "    Engine.load(options).generate('a' * 40, generate__n_predict=20)\n"
        "    torch.ones(300, 300) @ torch.ones(300, 300)\n"
        "    return count() - before\n"
        "print(started(1), started(3))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    one, three = map(int, result.stdout.split())
    assert one == 0
    assert three >= 2

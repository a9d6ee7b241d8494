"""The files, devices and types that options name: what is settled before weights are read."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import ModelFileError, UsageError, unknown_name
from specdec.folders import cache_folder
from specdec.gguf_file import GGUFFile
from specdec.options import DraftOptions, ModelOptions, Options

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

Scalar = int | float | bool | str

SIDECARS: Mapping[str, str] = {
    "draft-mtp": "mtp-",
    "draft-dspark": "dspark-",
    "draft-dflash": "dflash-",
    "draft-eagle3": "eagle3-",
    "draft-dflash2": "dflash-",
    "draft-lilicorr": "dflash-",
}
"""Spec type -> how the name of its draft begins in a repository that ships one, best first."""

MOST_THREADS = 512
"""Compute threads that may be asked for, unless there are more processors; llama.cpp's limit."""

SAMPLING_KEYS: Mapping[str, str] = {
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "temp": "temp",
    "penalty_last_n": "repeat_last_n",
    "penalty_repeat": "repeat_penalty",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}
"""``general.sampling.KEY`` of a model file -> field of `SamplingOptions`."""


def open_target(options: Options) -> GGUFFile:
    """The target's file with the user's metadata overrides. Raises `UsageError` without one."""
    model = options.model
    path = model.path
    if model.hf_repo is not None:
        path = download(model.hf_repo, model.hf_file, model.hf_token, offline=model.offline)
    elif path is None and model.url is not None:
        path = download_url(model.url, offline=model.offline)
    if path is None:
        raise UsageError("--model is required; give the target's GGUF file with -m")
    return GGUFFile.open(path, dict(parse_override(text) for text in model.override_kv))


def open_draft(options: Options) -> GGUFFile | None:
    """The draft's file, or None if there is none."""
    draft, model = options.spec.draft, options.model
    repo, name = draft.hf_repo, None if draft.path is None else str(draft.path)
    if repo is None and name is not None:
        return GGUFFile.open(name)
    kinds = list(SIDECARS)
    if repo is None:  # beside the target, for a type that was asked for
        kinds = [kind for kind in options.spec.enabled if kind in SIDECARS]
        repo = model.hf_repo if kinds else None
    if repo is None:
        return None
    first = tuple(SIDECARS[kind] for kind in kinds)
    path = download(
        repo,
        name,
        model.hf_token,
        offline=model.offline,
        flag="--spec-draft-hf" if draft.hf_repo else "--hf-repo",
        first=first,
    )
    if draft.hf_repo is None and not path.name.startswith(first):
        return None
    return GGUFFile.open(path)


def recommended_sampling(file: GGUFFile) -> dict[str, Any]:
    """The sampling values that a model file recommends, as a layer for `Options.merge`."""
    values: dict[str, Any] = {}
    for key, name in SAMPLING_KEYS.items():
        value = file.metadata.get(f"general.sampling.{key}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            values[f"sampling.{name}"] = value
    sequence = file.metadata.get("general.sampling.sequence")
    if isinstance(sequence, str):
        from specdec.sampler_names import parse_sampler_seq

        values["sampling.samplers"] = parse_sampler_seq(sequence)
    return values


def parse_override(text: str) -> tuple[str, Scalar]:
    """One `KEY=TYPE:VALUE` of `--override-kv`. Raises `UsageError`."""
    key, equals, rest = text.partition("=")
    kind, colon, value = rest.partition(":")
    if not (key and equals and colon and kind in _OVERRIDE_TYPES):
        raise UsageError(
            f"--override-kv: '{text}' is not KEY=TYPE:VALUE with TYPE int, float, bool or str"
        )
    try:
        return key, _OVERRIDE_TYPES[kind](value)
    except (ValueError, KeyError):
        raise UsageError(f"--override-kv: '{value}' is no {kind} value for {key}") from None


_OVERRIDE_TYPES: Mapping[str, Callable[[str], Scalar]] = {
    "int": int,
    "float": float,
    "bool": {"true": True, "false": False}.__getitem__,
    "str": str,
}


def download(
    repo: str,
    filename: str | None,
    token: str | None,
    *,
    offline: bool,
    flag: str = "--hf-repo",
    first: Sequence[str] = (),
) -> Path:
    """A file of a Hugging Face repository, from the local cache if it is there.

    ``repo`` is `user/name[:quant]`; without ``filename`` the file whose name begins with one of
    ``first`` is taken, else the one that contains the quant (Q4_K_M by default), else the first
    GGUF. Raises `UsageError` without the package, `ModelFileError` for a failed download.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise UsageError(
            f"{flag} needs the package huggingface_hub; pip install 'specdec[hub]'"
        ) from None
    name, _, quant = repo.partition(":")
    try:
        if filename is None:
            names = _list_files(huggingface_hub, name, token, offline)
            filename = pick_file(names, quant or "Q4_K_M", first)
        return Path(
            huggingface_hub.hf_hub_download(name, filename, token=token, local_files_only=offline)
        )
    except Exception as error:  # the package and its HTTP client have errors of many kinds
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelFileError(f"{flag} {repo}: {reason}") from error


def download_url(url: str, *, offline: bool) -> Path:
    """The file at an address, kept in the cache folder under its name.

    Raises `ModelFileError` for a failed download and `UsageError` if none is allowed.
    """
    import shutil
    import urllib.parse
    import urllib.request

    path = cache_folder() / Path(urllib.parse.urlsplit(url).path).name
    if path.is_file():
        return path
    if offline:
        raise UsageError(f"--model-url {url}: not downloaded yet, and --offline was given")
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(url) as reply, part.open("wb") as file:
            shutil.copyfileobj(reply, file)
        part.rename(path)
    except (OSError, ValueError) as error:
        raise ModelFileError(f"--model-url {url}: {error}") from error
    finally:
        part.unlink(missing_ok=True)
    return path


def cached_models() -> list[tuple[str, int]]:
    """Names and sizes in bytes of the GGUF files that were downloaded, hub files first."""
    found = [(path.name, path.stat().st_size) for path in sorted(cache_folder().glob("*.gguf"))]
    try:
        import huggingface_hub as hub
    except ImportError:
        return found
    try:
        repos = hub.scan_cache_dir().repos
    except hub.CacheNotFound:
        return found
    names = {
        (f"{repo.repo_id}/{file.file_name}", file.size_on_disk)
        for repo in repos
        for revision in repo.revisions
        for file in revision.files
        if file.file_name.endswith(".gguf")
    }
    return sorted(names) + found


def _list_files(hub: Any, repo: str, token: str | None, offline: bool) -> list[str]:
    if not offline:
        return list(hub.list_repo_files(repo, token=token))
    folder = Path(hub.snapshot_download(repo, token=token, local_files_only=True))
    return [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]


def pick_file(names: Sequence[str], quant: str, first: Sequence[str] = ()) -> str:
    """The GGUF file that is meant among those of a repository; see `download`."""
    models = sorted(name for name in names if name.endswith(".gguf"))
    for prefix in first:
        for name in models:
            if Path(name).name.startswith(prefix):
                return name
    others = ("mmproj", *SIDECARS.values())
    targets = [name for name in models if not Path(name).name.startswith(others)]
    if not targets:
        raise ValueError("the repository has no GGUF file of that kind")
    return next((name for name in targets if quant.lower() in name.lower()), targets[0])


def pick_device(model: ModelOptions, draft: DraftOptions | None = None) -> torch.device:
    """The device of the target, or of the draft. Raises `UsageError` for one that is not there."""
    import torch

    flag, layers_flag, name, n_layers = "--device", "--gpu-layers", model.device, model.n_gpu_layers
    if draft is not None:
        if draft.device:
            flag, name = "--spec-draft-device", draft.device
        if draft.n_gpu_layers != "auto":
            layers_flag, n_layers = "--spec-draft-ngl", draft.n_gpu_layers
    if name == "none" or n_layers == "0":
        return torch.device("cpu")
    known = devices()
    is_own = draft is None or layers_flag == "--spec-draft-ngl"
    if n_layers != "auto" and is_own:
        _report_layers(layers_flag, n_layers, has_gpu=len(known) > 1)
    if name is None:
        return torch.device(_default_device(known, model.main_gpu))
    return torch.device(_known_device(flag, name, known))


def _report_layers(flag: str, n_layers: str, *, has_gpu: bool) -> None:
    if not has_gpu:
        log.warning("%s %s: no usable GPU found; the model stays on the CPU", flag, n_layers)
    elif n_layers != "all":
        log.warning("%s %s: the whole model goes to the accelerator", flag, n_layers)


def _default_device(known: list[str], main_gpu: int) -> str:
    if main_gpu == 0:
        return known[-1]
    if f"cuda:{main_gpu}" not in known:
        raise UsageError(f"--main-gpu: {unknown_name('device', f'cuda:{main_gpu}', known)}")
    return f"cuda:{main_gpu}"


def _known_device(flag: str, names: str, known: list[str]) -> str:
    """The first of a comma list; llama.cpp's `CUDA0` is `cuda:0`."""
    name, *others = (re.sub(r"^cuda(\d)", r"cuda:\1", n.lower()) for n in names.split(","))
    if others:
        log.warning("%s %s: a model lies on one device; using %s", flag, names, name)
    if name not in known and f"{name}:0" not in known:
        raise UsageError(f"{flag}: {unknown_name('device', name, known)}")
    return name


def devices() -> list[str]:
    """The names that `--device` takes on this machine, the best one last."""
    import torch

    names = ["cpu"]
    if torch.backends.mps.is_available():
        names.append("mps")
    names += [f"cuda:{i}" for i in reversed(range(torch.cuda.device_count()))]
    return names


def describe_device(name: str) -> str:
    """What the device of that name is."""
    import platform

    import torch

    if name.startswith("cuda"):
        memory = torch.cuda.get_device_properties(name).total_memory
        return f"{torch.cuda.get_device_name(name)} ({memory / 2**20:.0f} MiB)"
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def set_threads(n_threads: int) -> None:
    """Sets torch's compute threads for the process; 0 or less keeps torch's own choice.

    Raises `UsageError` for so many that they cannot all be meant: torch would crash on them.
    """
    import torch

    most = max(MOST_THREADS, os.cpu_count() or 1)
    if n_threads > most:
        raise UsageError(f"--threads {n_threads}: more than {most}")
    if n_threads > 0:
        torch.set_num_threads(n_threads)


def cache_dtype(name: str | None, flag: str, default: str = "f32") -> torch.dtype:
    """The torch type of a cache; quantised types are kept as f16, which is said once.

    ``default`` is the type where no ``name`` is given.
    """
    import torch

    real = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    name = name or default
    if name not in real:
        log.warning("%s %s: quantised caches are not supported; using f16", flag, name)
        return torch.float16
    return real[name]

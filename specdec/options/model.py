"""The target and how it is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from specdec.options.checks import CACHE_TYPES, check_layers, require

RopeScaling = Literal["none", "linear", "yarn"]
Kernels = Literal["auto", "native", "torch"]
Activations = Literal["int8", "f32"]


@dataclass(frozen=True, slots=True)
class RopeOptions:
    """Overrides of the rotary embedding; None keeps what the model file says."""

    scaling: RopeScaling | None = None
    """How positions are scaled."""
    freq_base: float | None = None
    """Base of the frequencies."""
    freq_scale: float | None = None
    """Factor on the frequencies, 1 / context expansion."""
    yarn_orig_ctx: int = 0
    """YaRN: context length of training; 0 = from the model."""
    yarn_ext_factor: float = -1.0
    """YaRN: mix of extrapolation; negative = from the model."""
    yarn_attn_factor: float = -1.0
    """YaRN: magnitude; negative = from the model."""
    yarn_beta_slow: float = -1.0
    """YaRN: high correction dimension; negative = from the model."""
    yarn_beta_fast: float = -1.0
    """YaRN: low correction dimension; negative = from the model."""

    def __post_init__(self) -> None:
        if self.freq_scale is not None:
            require(
                math.isfinite(self.freq_scale) and self.freq_scale > 0,
                f"--rope-freq-scale must be finite and greater than 0, got {self.freq_scale}",
            )
        if self.freq_base is not None:
            require(
                math.isfinite(self.freq_base) and self.freq_base > 0,
                f"--rope-freq-base must be finite and greater than 0, got {self.freq_base}",
            )


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which target is loaded and how."""

    path: Path | None = None
    """The target's GGUF file."""
    hf_repo: str | None = None
    """The target on the Hugging Face hub, `user/repo[:quant]`."""
    hf_file: str | None = None
    """The exact file in that repository."""
    hf_token: str | None = None
    """Token for the hub."""
    url: str | None = None
    """Address to download the target from."""
    offline: bool = False
    """Use downloaded files only."""
    n_ctx: int = 0
    """Context length in tokens; 0 = the model's own."""
    n_batch: int = 2048
    """Prompt tokens per step."""
    n_ubatch: int = 512
    """Prompt tokens per forward pass."""
    cache_type_k: str | None = None
    """Type of the key cache; None = the type of the computation."""
    cache_type_v: str | None = None
    """Type of the value cache; None = the type of the computation."""
    device: str | None = None
    """`cpu`, `cuda`, `cuda:N`, `mps` or `none`; None = the best one there is."""
    n_gpu_layers: str = "auto"
    """Layers on the accelerator: 0 = the CPU, anything else = the whole model."""
    main_gpu: int = 0
    """Index of the CUDA device that is taken when none is named."""
    n_threads: int = -1
    """Compute threads; 0 or less = all physical cores."""
    kernels: Kernels = "auto"
    """`native`: packed weights on the CPU; `torch`: float32 weights; `auto`: native if it can."""
    activations: Activations = "int8"
    """What native kernels multiply quantised weights with."""
    override_kv: tuple[str, ...] = ()
    """Metadata overrides, `KEY=TYPE:VALUE`."""
    check_tensors: bool = False
    """Look for invalid values while loading."""
    warmup: bool = True
    """One empty run before the first prompt."""
    rope: RopeOptions = field(default_factory=RopeOptions)

    def __post_init__(self) -> None:
        require(self.n_ctx >= 0, f"--ctx-size must be 0 or more, got {self.n_ctx}")
        require(self.main_gpu >= 0, f"--main-gpu must be 0 or more, got {self.main_gpu}")
        check_layers("--gpu-layers", self.n_gpu_layers)
        require(self.n_batch >= 1, f"--batch-size must be at least 1, got {self.n_batch}")
        require(self.n_ubatch >= 1, f"--ubatch-size must be at least 1, got {self.n_ubatch}")
        for flag, name in (
            ("--cache-type-k", self.cache_type_k),
            ("--cache-type-v", self.cache_type_v),
        ):
            require(name is None or name in CACHE_TYPES, f"{flag}: Unsupported cache type: {name}")

"""What a file says about its rotary embedding, and what the user says instead."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from specdec.errors import ModelFileError, UnsupportedError
from specdec.gguf_file import GGUFFile
from specdec.models.layers import RopeSpec, rope_frequencies
from specdec.options import RopeOptions


def read_rope(file: GGUFFile, n_rot: int, options: RopeOptions) -> RopeSpec:
    """The rotary embedding of a file with the user's overrides (llama.cpp's `rope.scaling.*` keys).

    Raises `UnsupportedError` for a scaling type other than none, linear and yarn, `ModelFileError`
    for numbers that give no angles.
    """
    kind = options.scaling or file.get_str(file.key("rope.scaling.type"), default=None)
    linear = file.get_float(file.key("rope.scale_linear"), default=0.0)
    factor = file.get_float(file.key("rope.scaling.factor"), default=linear)
    kind = kind or "linear"
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedError(
            f"{file.path}: rope scaling type '{kind}' is not supported; known: none, linear, yarn"
        )
    scale = 1.0 if kind == "none" or not factor else 1.0 / factor
    file_base = file.get_float(file.key("rope.freq_base"), default=10000.0)
    base = file_base if options.freq_base is None else options.freq_base
    spec = RopeSpec(n_rot, base, options.freq_scale or scale, factors=_rope_factors(file))
    if kind == "yarn":
        n_train = file.get_int(file.key("context_length"), default=0)
        original = file.get_int(file.key("rope.scaling.original_context_length"), default=n_train)
        spec = _with_yarn(spec, file, options, options.yarn_orig_ctx or original)
    check_rope(file, spec)
    return spec


def check_rope(file: GGUFFile, spec: RopeSpec) -> None:
    """Raises `ModelFileError` unless what a file says about its rotary embedding gives angles."""
    try:
        with torch.device("cpu"):  # modules are built on the meta device
            angles, magnitude = rope_frequencies(spec)
        is_sound = bool(angles.isfinite().all()) and math.isfinite(magnitude)
    except (ArithmeticError, ValueError):
        is_sound = False
    if not is_sound:
        raise ModelFileError(
            f"{file.path}: the {file.key('rope.*')} keys give angles that are no numbers: base "
            f"{spec.freq_base:g}, scale {spec.freq_scale:g}, YaRN's extrapolation "
            f"{spec.ext_factor:g}, beta_fast {spec.beta_fast:g}, beta_slow {spec.beta_slow:g}"
        )


def _with_yarn(spec: RopeSpec, file: GGUFFile, options: RopeOptions, n_orig: int) -> RopeSpec:
    def pick(option: float, key: str, default: float) -> float:
        if option >= 0:
            return option
        return file.get_float(file.key(f"rope.scaling.{key}"), default=default)

    if n_orig <= 0:
        raise ModelFileError(
            f"{file.path}: YaRN needs {file.key('rope.scaling.original_context_length')}; "
            "give --yarn-orig-ctx"
        )
    return replace(
        spec,
        ext_factor=pick(options.yarn_ext_factor, "yarn_ext_factor", 1.0),
        attn_factor=pick(options.yarn_attn_factor, "yarn_attn_factor", 1.0),
        beta_fast=pick(options.yarn_beta_fast, "yarn_beta_fast", 32.0),
        beta_slow=pick(options.yarn_beta_slow, "yarn_beta_slow", 1.0),
        n_ctx_orig=n_orig,
    )


def _rope_factors(file: GGUFFile) -> tuple[float, ...]:
    if "rope_freqs.weight" not in file.tensors:
        return ()
    return tuple(file.load("rope_freqs.weight").tolist())

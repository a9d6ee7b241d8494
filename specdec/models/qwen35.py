"""Qwen3.5 (`general.architecture` = qwen35): gated delta nets, and now and then gated attention.

The norm before the feed-forward branch is called ``post_attention_norm`` in the file. May carry an
MTP layer, which is a gated attention layer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from specdec.errors import ModelFileError
from specdec.gguf_file import GGUFFile
from specdec.kv_cache import KVCache
from specdec.models.base import Target, count_mtp_layers, read_config, read_layer_spec
from specdec.models.delta_net import DeltaNetSpec
from specdec.models.layers import DecoderLayer, LayerSpec, rotate
from specdec.models.loading import build_target, count_layers
from specdec.models.rows import Rows, by_element
from specdec.options import RopeOptions


@dataclass(frozen=True, slots=True)
class GatedSpec(LayerSpec):
    """A block whose `attn_q` also makes a gate for the attention's output."""

    def new_layer(self) -> DecoderLayer:
        """See `LayerSpec.new_layer`."""
        return GatedLayer(self)


class GatedLayer(DecoderLayer):
    """A decoder layer with `attn_q` of twice the height: per head queries, then gates."""

    def add_attention(self, spec: LayerSpec) -> None:
        """See `DecoderLayer.add_attention`."""
        super().add_attention(spec)
        self.attn_q = nn.Linear(spec.n_embd, 2 * spec.n_head * spec.head_dim, bias=False)

    def forward(
        self, hidden: Tensor, cache: KVCache, layer: int, rotary: tuple[Tensor, Tensor], rows: Rows
    ) -> Tensor:
        """See `DecoderLayer.forward`."""
        x = self.attn_norm(hidden)
        q, gate = self.attn_q(x).unflatten(-1, (self.spec.n_head, -1)).chunk(2, dim=-1)
        q = rotate(self.attn_q_norm(q), *rotary) * self.spec.attention_scale
        k, v = self.keys_values(x, rotary)
        keys, values = cache.append(layer, k[: rows.count], v[: rows.count])
        mixed = self.attend_causal(q, keys, values, rows)
        mixed = mixed * by_element(torch.sigmoid, gate.flatten(1))
        hidden = hidden + self.project_attention(mixed)
        x = getattr(self, self.spec.ffn_norm)(hidden)
        return self.finish(hidden, self.feed_forward(x, rows))


def read_spec(file: GGUFFile, rope: RopeOptions, layer: int) -> LayerSpec:
    """Block ``layer``, of the model itself or for multi-token prediction."""
    spec = replace(
        read_layer_spec(file, rope, layer), has_qk_norm=True, ffn_norm="post_attention_norm"
    )
    if spec.head_dim_v != spec.head_dim:
        raise ModelFileError(
            f"{file.path}: {file.key('attention.value_length')} is {spec.head_dim_v}, expected "
            f"{spec.head_dim} as {file.key('attention.key_length')}"
        )
    values: dict[str, Any] = {field.name: getattr(spec, field.name) for field in fields(spec)}
    n_layer = file.get_int(file.key("block_count")) - count_mtp_layers(file)
    interval = file.get_int(file.key("full_attention_interval"), default=4)
    if interval < 1:
        raise ModelFileError(
            f"{file.path}: {file.key('full_attention_interval')} is {interval}, expected above 0"
        )
    if layer >= n_layer or (layer + 1) % interval == 0:
        return GatedSpec(**values)
    return DeltaNetSpec(**(values | _read_sizes(file)))


def _read_sizes(file: GGUFFile) -> dict[str, int]:
    """The sizes of the delta nets. Raises `ModelFileError` where they contradict each other."""
    names = {
        "n_key_heads": "ssm.group_count",
        "n_value_heads": "ssm.time_step_rank",
        "state_size": "ssm.state_size",
        "conv_kernel": "ssm.conv_kernel",
    }
    sizes = {name: file.get_int(file.key(suffix)) for name, suffix in names.items()}
    inner = file.get_int(file.key("ssm.inner_size"))
    if (
        min(sizes.values()) < 1
        or sizes["n_value_heads"] % sizes["n_key_heads"]
        or inner != sizes["n_value_heads"] * sizes["state_size"]
    ):
        found = ", ".join(f"{file.key(names[name])} {size}" for name, size in sizes.items())
        raise ModelFileError(
            f"{file.path}: {found} and {file.key('ssm.inner_size')} {inner} do not fit; expected "
            "sizes above 0, value heads a multiple of key heads, inner size = value heads x state "
            "size"
        )
    return sizes


def load(file: GGUFFile, rope: RopeOptions) -> Target:
    """The target in ``file``."""
    specs = [read_spec(file, rope, layer) for layer in range(count_layers(file))]
    return build_target(file, read_config(file), specs)

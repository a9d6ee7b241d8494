"""MiMo-V2 (`general.architecture` = mimo2): sliding windows, sinks, narrow values, a value scale.

Queries, keys and values may be one matrix. Carries MTP layers, several in a chain, which read the
final state before the output norm.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from torch import Tensor, nn
from torch.nn import functional as F

from specdec.gguf_file import GGUFFile
from specdec.models.base import Target, read_config, read_layer_spec, read_window
from specdec.models.experts import Routing
from specdec.models.layers import DecoderLayer, LayerSpec, rotate
from specdec.models.loading import build_target, count_layers, read_experts
from specdec.models.rope import check_rope
from specdec.options import RopeOptions


@dataclass(frozen=True, slots=True)
class FusedSpec(LayerSpec):
    """A block whose queries, keys and values come from one matrix, `attn_qkv`."""

    def new_layer(self) -> DecoderLayer:
        """See `LayerSpec.new_layer`."""
        return FusedLayer(self)


class FusedLayer(DecoderLayer):
    """A decoder layer with `attn_qkv`: the rows of q, of k and of v, one below the other."""

    def add_attention(self, spec: LayerSpec) -> None:
        """See `DecoderLayer.add_attention`."""
        super().add_attention(spec)
        widths = [self.attn_q.out_features, self.attn_k.out_features, self.attn_v.out_features]
        del self.attn_q, self.attn_k, self.attn_v
        self.attn_qkv = nn.Linear(spec.n_embd, sum(widths), bias=False)
        self._ends = (widths[0], widths[0] + widths[1])

    def queries(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """See `DecoderLayer.queries`."""
        q = F.linear(x, self.attn_qkv.weight[: self._ends[0]])
        q = q.view(-1, self.spec.n_head, self.spec.head_dim)
        return rotate(q, *rotary) * self.spec.attention_scale

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.keys_values`."""
        spec, (k_start, v_start) = self.spec, self._ends
        k = F.linear(x, self.attn_qkv.weight[k_start:v_start])
        v = F.linear(x, self.attn_qkv.weight[v_start:])
        k = k.view(-1, spec.n_head_kv, spec.head_dim)
        return rotate(k, *rotary), v.view(-1, spec.n_head_kv, spec.head_dim_v)


def read_spec(file: GGUFFile, rope: RopeOptions, layer: int) -> LayerSpec:
    """Block ``layer``, of the model itself or for multi-token prediction."""
    key = file.key
    spec = replace(
        read_layer_spec(file, rope, layer),
        has_sinks=f"blk.{layer}.attn_sinks.weight" in file.tensors,
        value_scale=file.get_float(key("attention.value_scale"), default=1.0) or 1.0,
    )
    n_block = file.get_int(key("block_count"))
    if file.get_bools(key("attention.sliding_window_pattern"), length=n_block)[layer]:
        base = file.get_float(key("rope.freq_base_swa"), default=10000.0)
        window = read_window(file)
        spec = replace(spec, window=window, rope=replace(spec.rope, freq_base=base))
        check_rope(file, spec.rope)
    routing = Routing(
        gating="sigmoid",
        is_normalised=file.get_bool(key("expert_weights_norm"), default=True),
        scale=file.get_float(key("expert_weights_scale"), default=1.0),
    )
    spec = read_experts(file, spec, layer, routing)
    if f"blk.{layer}.attn_qkv.weight" not in file.tensors:
        return spec
    return FusedSpec(**{field.name: getattr(spec, field.name) for field in fields(spec)})


def load(file: GGUFFile, rope: RopeOptions) -> Target:
    """The target in ``file``."""
    n_layer = count_layers(file)
    specs = [read_spec(file, rope, layer) for layer in range(n_layer)]
    return build_target(file, replace(read_config(file), final_tap=n_layer), specs)

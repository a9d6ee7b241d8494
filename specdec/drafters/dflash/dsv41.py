"""The trunk of the DFlash family on blocks of DeepSeek-V4.1.

As `dsv4` but for three things. The hyper-connections are *single-pass*: what a sub-layer reads is
weighted by the `pre` of the sub-layer before it, so that one product with the streams serves both;
the first one reads stream 0, and the last `pre` collapses the streams at the end. Queries have no
norm of their own. All slots see what the first one sees, with a window that is one longer than the
file says: the context that reaches the window's length before the last token, and all of the block.
Reference: llama.cpp's `graph_dsv41` in `src/models/dspark.cpp`, which has not been run against it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specdec.drafters.dflash.config import DraftConfig
from specdec.drafters.dflash.dsv4 import DSV4Layer, HyperTrunk, leave, weighted
from specdec.drafters.dflash.dsv4_config import read_dsv4_spec
from specdec.drafters.dflash.trunk import KeysValues
from specdec.gguf_file import GGUFFile


class DSV41Trunk(HyperTrunk):
    """DeepSeek-V4.1: every sub-layer's weights are those that the one before it has computed."""

    def __init__(self, file: GGUFFile, config: DraftConfig) -> None:
        spec = read_dsv4_spec(file, config)
        super().__init__(config, spec, [DSV41Layer(spec, i) for i in range(config.n_layer)])

    def run(
        self,
        streams: Tensor,
        rotary: tuple[Tensor, Tensor],
        context: Sequence[KeysValues],
        visible: Tensor,
    ) -> Tensor:
        """See `HyperTrunk.run`."""
        pre = streams.new_zeros(streams.shape[:2])
        pre[:, 0] = 1.0
        for layer, held in zip(self._layers, context, strict=True):
            streams, pre = layer(streams, rotary, held, visible[:1], pre)
        return weighted(pre, streams)


class DSV41Layer(DSV4Layer):
    """A layer that takes over the weights of its input and passes on those of the next one."""

    def forward(  # type: ignore[override]
        self,
        streams: Tensor,  # [S, hc, D]
        rotary: tuple[Tensor, Tensor],
        context: KeysValues,
        visible: Tensor,  # [1, N + S]
        pre: Tensor,  # [S, hc]
    ) -> tuple[Tensor, Tensor]:
        """The streams [S, hc, D] after both sub-layers, and the weights [S, hc] for the next."""
        attention = self.mixes(streams, "attn")
        out = self.attend(self.attn_norm(weighted(pre, streams)), rotary, context, visible)
        streams = leave(streams, out, attention)
        experts = self.mixes(streams, "ffn")
        out = self.feed_forward(self.ffn_norm(weighted(attention.pre, streams)))
        return leave(streams, out, experts), experts.pre

    def queries(self, x: Tensor) -> Tensor:
        """Queries [S, H, Dh] of normed input [S, D], neither rotated nor scaled."""
        q = self.attn_q_b(self.attn_q_a_norm(self.attn_q_a(x)))
        return q.view(-1, self.spec.n_head, self.spec.head_dim)  # type: ignore[no-any-return]

"""DeepSeek-V4.1 backbone, in plain float64 loops, from upstream's text (`graph_dsv41`).

It has V4's parts (see `dsv4_reference.py`) with three changes: queries are not normed, the whole
block sees what its first slot sees (with a window one wider than the file's), and every mixture of
streams is used one sub-layer later than it is made ("single pass"). The first sub-layer reads
stream 0, the end collapses by the last mixture.
"""

from __future__ import annotations

import numpy as np
from drafters.dflash.dspark_reference import Floats
from drafters.dflash.dsv4_reference import DSV4Reference


class DSV41Reference(DSV4Reference):
    normed_heads = False

    def sees(self, query: int, start: int, key: int) -> bool:
        return start - key < self.window + 1 and not (self.is_causal and key > start)

    def slots(self, block: Floats, start: int) -> tuple[Floats, Floats]:
        streams = [np.stack([row] * self.n_hc) for row in block]
        carried: list[Floats] | None = None
        for layer in range(self.n_layer):
            mixes = [self.mixes(layer, "attn", x) for x in streams]
            if carried is None:
                inputs = [x[0] for x in streams]
            else:
                inputs = [pre @ x for pre, x in zip(carried, streams, strict=True)]
            normed = np.stack([self.rms(x, self.weight("attn_norm", layer)) for x in inputs])
            outputs = self.attention(layer, normed, start)
            streams = [self.put_back(*parts) for parts in zip(outputs, streams, mixes, strict=True)]
            carried = []
            for t, x in enumerate(streams):
                mix = self.mixes(layer, "ffn", x)
                carried.append(mix.pre)
                normed_row = self.rms(mixes[t].pre @ x, self.weight("ffn_norm", layer))
                streams[t] = self.put_back(self.feed_forward(layer, normed_row), x, mix)
        assert carried is not None
        ends = np.stack([pre @ x for pre, x in zip(carried, streams, strict=True)])
        return np.stack([self.rms(x, self.weight("output_norm")) for x in ends]), ends

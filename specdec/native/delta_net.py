"""A gated delta net as the kernels read it, and the states that a pass reads and leaves behind."""

from __future__ import annotations

import ctypes

from specdec.kv_cache import KVCache
from specdec.models.delta_net import DeltaNetSpec
from specdec.native.library import DeltaNet, LayerCall
from specdec.native.weights import LayerTensors


def delta_net_struct(spec: DeltaNetSpec, tensors: LayerTensors) -> DeltaNet:
    """What stands in the place of attention in the layer that ``tensors`` belong to."""
    return DeltaNet(
        n_key_heads=spec.n_key_heads,
        n_value_heads=spec.n_value_heads,
        state_size=spec.state_size,
        conv_kernel=spec.conv_kernel,
        qkv=tensors.matrix("attn_qkv"),
        gate=tensors.matrix("attn_gate"),
        alpha=tensors.matrix("ssm_alpha"),
        beta=tensors.matrix("ssm_beta"),
        convolution=tensors.address(tensors.vector("ssm_conv1d.weight").T.contiguous()),
        dt=tensors.pointer("ssm_dt.bias"),
        a=tensors.pointer("ssm_a"),
        norm=tensors.pointer("ssm_norm.weight"),
    )


def add_states(
    call: LayerCall, cache: KVCache, layer: int, n: int, *, keeps_every_state: bool
) -> None:
    """Gives ``call`` the state before its ``n`` rows and memory for those behind them.

    That memory goes into the cache here, and is filled by the pass: one state a row, or the last.
    """
    before = cache.state(layer)
    n_states = n if keeps_every_state else min(n, 1)
    states = [cache.new_state(layer) for _ in range(n_states)]
    for row, state in enumerate(states, start=n - n_states):
        cache.put_state(layer, row + 1, state)
    call.inputs, call.memory = (part.data_ptr() for part in before)
    behind = states if keeps_every_state else states * n
    call.inputs_behind, call.memory_behind = (
        (ctypes.c_void_p * n)(*(state[part].data_ptr() for state in behind)) for part in range(2)
    )

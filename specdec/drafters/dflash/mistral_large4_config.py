"""What a draft on the Mistral Large 4 backbone says about its blocks. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.drafters.compatibility import check_shape
from specdec.drafters.dflash.config import read_block_size
from specdec.drafters.dflash.names import SPELLINGS, mask_table
from specdec.errors import ModelFileError, UnsupportedError
from specdec.gguf_file import GGUFFile

POSITIVE = (
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.kv_lora_rank",
    "attention.key_length_mla",
    "attention.value_length_mla",
    "rope.dimension_count",
)
"""Keys without which there is no block."""


@dataclass(frozen=True, slots=True)
class MistralLarge4Spec:
    """Sizes of the blocks."""

    n_embd: int
    n_head: int
    rank: int
    """Width of the latent that is key and value of all heads."""
    head_dim: int
    """Width of a query; its last `n_rot` dimensions are rotated."""
    head_dim_v: int
    n_rot: int
    n_ff: int
    rms_eps: float
    window: int
    """Context keys visible to the last token, itself included; one more than the file says."""

    @property
    def key_dim(self) -> int:
        """Width of a key: the latent and the rotated part."""
        return self.rank + self.n_rot

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of a layer, rows first."""
        n_embd, n_head = self.n_embd, self.n_head
        return {
            "attn_norm": (n_embd,),
            "attn_q": (n_head * self.head_dim, n_embd),
            "attn_kv_a_mqa": (self.key_dim, n_embd),
            "attn_kv_a_norm": (self.rank,),
            "attn_k_b": (n_head, self.rank, self.head_dim - self.n_rot),
            "attn_v_b": (n_head, self.head_dim_v, self.rank),
            "attn_output": (n_embd, n_head * self.head_dim_v),
            "ffn_norm": (n_embd,),
            "ffn_gate": (self.n_ff, n_embd),
            "ffn_up": (self.n_ff, n_embd),
            "ffn_down": (n_embd, self.n_ff),
        }


def read_mistral_large4_spec(file: GGUFFile) -> MistralLarge4Spec:
    """The blocks of a draft; raises `ModelFileError` for keys that are missing or below 1.

    The other rules are those of `check_mistral_large4`.
    """
    sizes = {name: file.get_int(file.key(name)) for name in POSITIVE}
    for name, size in sizes.items():
        if size < 1:
            raise ModelFileError(f"{file.path}: {file.key(name)} is {size}, expected 1 or more")
    window = file.get_int(file.key("attention.sliding_window"), default=0)
    if window < 1:
        raise ModelFileError(
            f"{file.path}: DSpark Mistral Large 4 draft expects a sliding window; found "
            f"{file.key('attention.sliding_window')} = {window}, expected 1 or more"
        )
    return MistralLarge4Spec(
        n_embd=sizes["embedding_length"],
        n_head=sizes["attention.head_count"],
        rank=sizes["attention.kv_lora_rank"],
        head_dim=sizes["attention.key_length_mla"],
        head_dim_v=sizes["attention.value_length_mla"],
        n_rot=sizes["rope.dimension_count"],
        n_ff=sizes["feed_forward_length"],
        rms_eps=file.get_float(file.key("attention.layer_norm_rms_epsilon")),
        window=window + 1,
    )


def check_mistral_large4(file: GGUFFile) -> None:
    """Raises unless the sizes of a Mistral Large 4 draft are possible and its tensors have them.

    `UnsupportedError` for several heads of keys, `ModelFileError` for contradictory keys,
    `MismatchError` for a tensor of another shape.
    """
    key, spec = file.key, read_mistral_large4_spec(file)
    n_head_kv = file.get_int(key("attention.head_count_kv"))
    if n_head_kv != 1:
        raise UnsupportedError(
            f"{file.path}: {key('attention.head_count_kv')} is {n_head_kv}, expected 1"
        )
    width = file.get_int(key("attention.key_length"), default=spec.n_embd // spec.n_head)
    if width != spec.key_dim:
        raise ModelFileError(
            f"{file.path}: DSpark Mistral Large 4 draft expects key_length == kv_lora_rank + rope "
            f"dim; found {key('attention.key_length')} = {width}, expected {spec.rank} + "
            f"{spec.n_rot}"
        )
    if spec.n_rot % 2 or spec.n_rot >= spec.head_dim:
        raise ModelFileError(
            f"{file.path}: {key('rope.dimension_count')} is {spec.n_rot}, expected an even number "
            f"below {key('attention.key_length_mla')} = {spec.head_dim}"
        )
    _check_tensors(file, spec)


def _check_tensors(file: GGUFFile, spec: MistralLarge4Spec) -> None:
    table = mask_table(file)
    if not table:
        raise ModelFileError(
            f"{file.path}: the table of mask embeddings is missing; expected a tensor with one of "
            f"the names {', '.join(SPELLINGS['mask table'])}"
        )
    file.get_int(file.key("block_size"))  # no default: the table has a row per slot but the first
    shape = (read_block_size(file) - 1, spec.n_embd)
    check_shape(file, f"{table}.weight", shape, file.key("block_size"))
    n_layer = min(file.get_int(file.key("block_count")), len(file.tensors))
    for layer in range(n_layer):
        for name, expected in spec.layer_shapes.items():
            check_shape(file, f"blk.{layer}.{name}.weight", expected, "the dflash.* keys")

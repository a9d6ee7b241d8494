"""The DSpark head: a Markov chain over the block, and how likely each step is to be accepted.

With W the output matrix and d_{i-1} the token before slot i (at first the last token), from tables
of rank R:

    m_i = markov_w1[d_{i-1}]                                  [R]
    logits_i = W h_i + markov_w2 m_i                          [VD]
    confidence_i = sigmoid(conf_proj [c_i ; m_i] + bias)

c_i is h_i, or the state before the output norm where the backbone says so. A file with a joint
projection J carries a gated state s from slot to slot, zeros at first:

    [a ; b ; c] = J [s ; markov_w1[d_{i-1}] ; h_i] + bias
    s = sigmoid(a) * s + (1 - sigmoid(a)) * tanh(b)           m_i = tanh(c)

Slot i predicts the token after it, so slot 0, the last token itself, drafts already. Files with
`dflash.sample_from_anchor` = false start at slot 1 like the other heads. Reference: llama.cpp's
`src/models/dspark.cpp`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.drafters.base import N_BEST, DraftSampler, Pick, to_host
from specdec.drafters.dflash.config import DraftConfig
from specdec.drafters.dflash.head import DraftBlock, DraftHead
from specdec.drafters.dflash.names import joint_projection
from specdec.drafters.vocabulary import DraftVocabulary
from specdec.gguf_file import GGUFFile
from specdec.models.layers import new_embedding


class DSparkHead(DraftHead):
    """Chains the slots: each one's logits know the token drafted before it."""

    name = "draft-dspark"

    def __init__(self, file: GGUFFile, config: DraftConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(file, config, vocabulary)
        from_anchor = file.get_bool(file.key("sample_from_anchor"), default=True)
        self.first_slot = 0 if from_anchor else 1
        """The first slot that drafts."""
        self.n_max = config.block_size - self.first_slot
        self.rank = file.info("markov_w1.weight").shape[1]
        self.markov_w1 = new_embedding(config.n_vocab, self.rank)
        self.markov_w2 = nn.Linear(self.rank, vocabulary.n_rows, bias=False)
        self.has_confidence = "conf_proj.weight" in file.tensors
        if self.has_confidence:
            has_bias = "conf_proj.bias" in file.tensors
            self.conf_proj = nn.Linear(config.n_embd + self.rank, 1, bias=has_bias)
        self._joint_name = joint_projection(file)
        if self._joint_name:
            joint = nn.Linear(config.n_embd + 2 * self.rank, 3 * self.rank)
            self.add_module(self._joint_name, joint)

    def block_len(self, n_draft: int) -> int:
        """See `DraftHead.block_len`."""
        return n_draft + self.first_slot

    def propose(self, block: DraftBlock, n_draft: int, sampler: DraftSampler) -> list[Pick]:
        """See `DraftHead.propose`."""
        if sampler.samples:
            return self._draw(block, n_draft, sampler)
        tokens, confidences = to_host(*self.chain(block, n_draft)[1:])
        picks: list[Pick] = []
        for token, confidence in zip(tokens.tolist(), confidences.tolist(), strict=True):
            if confidence < sampler.p_min:
                break
            picks.append(Pick(token, confidence, None, None))
        return picks

    def chain(self, block: DraftBlock, n_draft: int) -> tuple[Tensor, Tensor, Tensor]:
        """The greedy chain, on the device: logits [K, VD], tokens [K] and confidences [K]."""
        steps = _Steps(self, block, n_draft)
        before = torch.tensor(block.last_token, device=block.hidden.device)
        tokens, confidences = [], []
        for index in range(n_draft):
            logits, confidence = steps.take(index, before)
            before = self.vocabulary.to_target(logits.argmax())
            tokens.append(before)
            confidences.append(confidence)
        return steps.logits, torch.stack(tokens), torch.stack(confidences)

    def _draw(self, block: DraftBlock, n_draft: int, sampler: DraftSampler) -> list[Pick]:
        """The chain with every token drawn from its slot's ten best, before the next slot."""
        steps = _Steps(self, block, n_draft)
        before = torch.tensor(block.last_token, device=block.hidden.device)
        picks: list[Pick] = []
        for index in range(n_draft):
            logits, confidence = steps.take(index, before)
            best, rows = logits.topk(min(N_BEST, logits.shape[-1]))
            scores, ids, sure = to_host(best, self.vocabulary.to_target(rows), confidence)
            if float(sure) < sampler.p_min:
                break
            picks.append(sampler.pick(scores, ids)._replace(confidence=float(sure)))
            before = torch.tensor(picks[-1].token, device=before.device)
        return picks

    def follow(self, hidden: Tensor, state: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """The chain along tokens that are known: what training compares with.

        ``hidden`` and ``state`` [A, K, D] are the drafting slots of A blocks, ``before`` [A, K] the
        token before each. Logits [A, K, VD] and the logits of the confidences [A, K].
        """
        mixed = self.markov_w1(before)
        if self._joint_name:
            memory, mixes = hidden.new_zeros(hidden.shape[0], self.rank), []
            for slot in range(hidden.shape[1]):
                out, memory = self.mix(mixed[:, slot], hidden[:, slot], memory)
                mixes.append(out)
            mixed = torch.stack(mixes, dim=1)
        logits = self.vocabulary.logits(hidden) + self.markov_w2(mixed)
        if not self.has_confidence:
            return logits, torch.full_like(logits[..., 0], torch.inf)
        return logits, self.conf_proj(torch.cat((state, mixed), dim=-1))[..., 0]

    def mix(self, embedded: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """m [..., R] after tokens with rows ``embedded`` [..., R] of `markov_w1`, and the gated
        state [..., R] that replaces ``memory``.
        """
        if not self._joint_name:
            return embedded, memory
        joint = self.get_submodule(self._joint_name)
        parts = joint(torch.cat((memory, embedded, hidden), dim=-1))
        gate, new, out = parts.chunk(3, dim=-1)
        gate = gate.sigmoid()
        return out.tanh(), gate * memory + (1 - gate) * new.tanh()


class _Steps:
    """One walk along a block: what all its slots share is computed once."""

    def __init__(self, head: DSparkHead, block: DraftBlock, n_draft: int) -> None:
        slots = slice(head.first_slot, head.first_slot + n_draft)
        self.head = head
        self.hidden, self.state = block.hidden[slots], block.state[slots]
        self.logits = head.vocabulary.logits(self.hidden)
        self.memory = self.hidden.new_zeros(head.rank)
        self.certain = torch.ones((), device=self.hidden.device)

    def take(self, index: int, before: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [VD] and confidence [] of the next slot, after the token ``before`` [].

        Without a confidence head the confidence is 1.
        """
        head = self.head
        embedded = head.markov_w1(before)
        mixed, self.memory = head.mix(embedded, self.hidden[index], self.memory)
        self.logits[index] += head.markov_w2(mixed)
        if not head.has_confidence:
            return self.logits[index], self.certain
        confidence = head.conf_proj(torch.cat((self.state[index], mixed))).sigmoid()
        return self.logits[index], confidence[0]

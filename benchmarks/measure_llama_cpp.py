"""One measurement of llama.cpp through its own library: MODEL THREADS [plain] -> a line of JSON.

`plain` keeps weights as they are in the file: on some virtual machines the instructions of its
repacked ones (AMX) are announced and then refused. Runs in an environment with `llama-cpp-python`;
specdec need not be there.
"""

from __future__ import annotations

import ctypes
import sys
import time

import numpy as np
from llama_cpp import llama_cpp as ll
from work import DEPTH, N_CONTEXT, N_GENERATE, PASSES, PROMPT, memory, report, timed_in_turn


class Peer:
    """A loaded model with one sequence; `length` tokens of it are in the cache."""

    def __init__(self, path: str, n_threads: int, *, repack: bool) -> None:
        params = ll.llama_model_default_params()
        params.use_extra_bufts = repack
        self.model = ll.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            sys.exit(f"llama.cpp cannot load {path}")
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 2 * DEPTH, 512, 512
        params.n_threads = params.n_threads_batch = n_threads
        self.context = ll.llama_init_from_model(self.model, params)
        self.n_vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.batch = ll.llama_batch_init(512, 0, 1)
        self.length = 0

    def step(self, tokens: list[int], *, all_rows: bool) -> int:
        """Decodes tokens and returns the best one to follow; logits of all rows or of the last."""
        self.batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            self.batch.token[row] = token
            self.batch.pos[row] = self.length + row
            self.batch.n_seq_id[row] = 1
            self.batch.seq_id[row][0] = 0
            self.batch.logits[row] = all_rows or row == len(tokens) - 1
        if ll.llama_decode(self.context, self.batch):
            sys.exit("llama.cpp: decoding failed")
        self.length += len(tokens)
        logits = ll.llama_get_logits_ith(self.context, -1)
        return int(np.argmax(np.ctypeslib.as_array(logits, shape=(self.n_vocab,))))

    def truncate(self, length: int) -> None:
        """Forgets the tokens from ``length`` on."""
        ll.llama_memory_seq_rm(ll.llama_get_memory(self.context), 0, length, -1)
        self.length = length


@ll.llama_log_callback
def _silent(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """llama.cpp writes its progress to stderr; nobody wants it here."""


def main(path: str, n_threads: int, *, repack: bool) -> None:
    """The same steps as in `measure_specdec`."""
    ll.llama_log_set(_silent, ctypes.c_void_p(0))
    ll.llama_backend_init()
    started = time.perf_counter()
    peer = Peer(path, n_threads, repack=repack)
    load = time.perf_counter() - started
    peer.step(PROMPT[:8], all_rows=False)  # first-time work
    peer.truncate(0)
    started = time.perf_counter()
    token = peer.step(PROMPT, all_rows=False)
    prompt = time.perf_counter() - started
    peer.truncate(N_CONTEXT)
    started = time.perf_counter()
    for _ in range(N_GENERATE):
        token = peer.step([token], all_rows=False)
    generate = time.perf_counter() - started

    def one_pass(n_tokens: int) -> None:
        peer.step(PROMPT[:n_tokens], all_rows=True)
        peer.truncate(DEPTH)

    passes = timed_in_turn(one_pass, PASSES)
    report(load, prompt, generate, passes, memory())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), repack=sys.argv[3:] != ["plain"])

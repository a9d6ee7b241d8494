"""Text in, text out: a loaded model and its drafters, which open sessions that answer requests."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from specdec.chat import ChatTemplate, Message, choose_template, find_template
from specdec.drafters.base import FirstOf
from specdec.drafters.selection import DraftContext, build_drafters, choose_types
from specdec.errors import ModelFileError, UsageError
from specdec.generate import warm_up
from specdec.gguf_file import GGUFFile
from specdec.kv_cache import KVCache
from specdec.models import check_architecture, load_target
from specdec.models.base import Target
from specdec.options import Options, SpecOptions
from specdec.resources import (
    cache_dtype,
    open_draft,
    open_target,
    pick_device,
    set_threads,
)
from specdec.session import Chunk, Completion, Session
from specdec.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

DEFAULT_CONTEXT = 4096
"""Context length when neither the user nor the model file says one."""


class Engine:
    """A target, its tokenizer and the chosen drafters, loaded once."""

    def __init__(
        self,
        options: Options,
        target: Target,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        drafter: FirstOf,
        n_ctx: int,
        cache_types: tuple[torch.dtype, torch.dtype],
    ) -> None:
        self.options = options
        self.target = target
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.drafter = drafter
        self.n_ctx = n_ctx
        self.cache_types = cache_types

    @classmethod
    def load(cls, options: Options, progress: Callable[[int, int], None] | None = None) -> Self:
        """Everything the options name, checked before weights are read.

        ``progress`` is told (tensors read, tensors in all). Raises `UsageError`, `ModelFileError`
        and their kin.
        """
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open_target(options))
            draft_file = open_draft(options)
            if draft_file is not None:
                stack.enter_context(draft_file)
            check_architecture(file)
            types = choose_types(options.spec, file, draft_file)
            tokenizer = _tokenizer(file)
            template = _chat_template(options, file, tokenizer)
            options = _without_missing_eos(options, tokenizer)
            set_threads(options.model.n_threads)
            _count_tensors([file, *([draft_file] if draft_file else [])], progress)
            target = load_target(
                file,
                rope=options.model.rope,
                kernels=options.model.kernels,
                activations=options.model.activations,
                device=pick_device(options.model),
                check_tensors=options.model.check_tensors,
            )
            n_ctx = _context_length(options, target)
            cache_types = _cache_types(options, target)
            drafter = build_drafters(
                types, _draft_context(options, target, file, draft_file, n_ctx, cache_types)
            )
        if options.model.warmup:
            warm_up(target)
        return cls(options, target, tokenizer, template, drafter, n_ctx, cache_types)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Writes down what drafters keep from run to run; for the end of the last request."""
        self.drafter.save()

    def with_spec(self, spec: SpecOptions) -> Self:
        """The same target with the drafters of ``spec``; raises what `load` raises for them."""
        options = replace(self.options, spec=spec)
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open_target(options))
            draft_file = open_draft(options)
            if draft_file is not None:
                stack.enter_context(draft_file)
            types = choose_types(spec, file, draft_file)
            context = _draft_context(
                options, self.target, file, draft_file, self.n_ctx, self.cache_types
            )
            drafter = build_drafters(types, context)
        return type(self)(
            options,
            self.target,
            self.tokenizer,
            self.chat_template,
            drafter,
            self.n_ctx,
            self.cache_types,
        )

    def session(self, *, speculate: bool = True) -> Session:
        """A conversation of its own, with an empty cache; plain decoding if not ``speculate``."""
        return Session(self, copy.copy(self.drafter) if speculate else FirstOf([]))

    def new_cache(self) -> KVCache:
        """An empty cache for the target, of the types that the options name."""
        types = self.cache_types
        return self.target.new_cache(self.n_ctx, dtype_k=types[0], dtype_v=types[1])

    def stream(self, prompt: str | Sequence[Message], **overrides: Any) -> Iterator[Chunk]:
        """The pieces of the reply to one prompt, in a session of its own."""
        return self.session().stream(prompt, **overrides)

    def generate(self, prompt: str | Sequence[Message], **overrides: Any) -> Completion:
        """The whole reply to one prompt."""
        return self.session().generate(prompt, **overrides)

    def encode(self, prompt: str | Sequence[Message], chat: Mapping[str, Any]) -> list[int]:
        """Token ids of a text, with BOS where the model wants it, or of messages by the template.

        ``chat`` are variables for the template. Raises `UsageError` when nothing is left to start
        from.
        """
        if isinstance(prompt, str):
            tokens = self.tokenizer.encode(prompt, add_special=True, parse_special=True)
        else:
            if self.chat_template is None:
                raise UsageError("--chat-template: the model file has no chat template; give one")
            quoted = [self._quoted(message) for message in prompt]
            tokens = self.tokenizer.encode_chat(self.chat_template.render(quoted, **chat))
        if not tokens and self.tokenizer.bos_id is not None:
            tokens = [self.tokenizer.bos_id]
        if not tokens:
            raise UsageError("--prompt is empty and the model has no BOS token to start from")
        return tokens

    def _quoted(self, message: Message) -> Message:
        """The message, its text unable to pass for control tokens."""
        content = message["content"]
        if not isinstance(content, str):
            return message
        return {**message, "content": self.tokenizer.quote(content)}


def _context_length(options: Options, target: Target) -> int:
    n_train = target.config.n_ctx_train
    asked, scaling = options.model.n_ctx, options.model.rope
    if 0 < n_train < asked and scaling.scaling is None and scaling.freq_scale is None:
        log.warning(
            "--ctx-size %d: the model was trained for %d tokens; text past them may be poor",
            asked,
            n_train,
        )
    return asked or n_train or DEFAULT_CONTEXT


def _cache_types(options: Options, target: Target) -> tuple[torch.dtype, torch.dtype]:
    """Of the target's keys and values."""
    default = "f16" if target.is_row_invariant else "f32"  # torch converts whole caches
    return (
        cache_dtype(options.model.cache_type_k, "--cache-type-k", default),
        cache_dtype(options.model.cache_type_v, "--cache-type-v", default),
    )


def _draft_context(
    options: Options,
    target: Target,
    file: GGUFFile,
    draft_file: GGUFFile | None,
    n_ctx: int,
    cache_types: tuple[torch.dtype, torch.dtype],
) -> DraftContext:
    draft = options.spec.draft
    return DraftContext(
        spec=options.spec,
        target=target,
        target_file=file,
        draft_file=draft_file,
        n_ctx=n_ctx,
        cache_types=cache_types,
        dtype_k=cache_dtype(draft.cache_type_k, "--spec-draft-type-k"),
        dtype_v=cache_dtype(draft.cache_type_v, "--spec-draft-type-v"),
        device=pick_device(options.model, draft),
        rope=options.model.rope,
        kernels=options.model.kernels,
        activations=options.model.activations,
    )


def _without_missing_eos(options: Options, tokenizer: Tokenizer) -> Options:
    """The options without `--ignore-eos` if there is no such token."""
    if not options.sampling.ignore_eos or tokenizer.eos_id is not None:
        return options
    log.warning("--ignore-eos: the vocabulary has no EOS token; ignored")
    return options.merge({"sampling.ignore_eos": False})


def _count_tensors(files: Sequence[GGUFFile], progress: Callable[[int, int], None] | None) -> None:
    """Lets the files report every tensor that is read."""
    if progress is None:
        return
    report, done = progress, itertools.count(1)
    total = sum(len(file.tensors) for file in files)
    for file in files:
        file.on_load = lambda: report(next(done), total)


def _tokenizer(file: GGUFFile) -> Tokenizer:
    try:
        return Tokenizer.from_metadata(file.metadata)
    except ModelFileError as error:
        raise type(error)(f"{file.path}: {error}") from None


def _chat_template(options: Options, file: GGUFFile, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template the user gave, else the model's own, else None."""
    if options.chat.template is None and find_template(file.metadata) is None:
        return None
    source = choose_template(options.chat.template, file.metadata, jinja=options.chat.jinja)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    return ChatTemplate(
        source,
        bos_token="" if bos is None else tokenizer.token_text(bos),
        eos_token="" if eos is None else tokenizer.token_text(eos),
    )

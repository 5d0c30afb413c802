"""The Python API: `load` a model, then `generate`, `generate_many`, `stream` or `chat`.

    import outpace
    model = outpace.load("smollm2-135m")
    print(model.chat([{"role": "user", "content": "Why is the sky blue?"}]).text)

Neighbours: engine.py runs the requests; here names become files, text becomes tokens, requests become results.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

from . import hub
from .backends.base import Backend
from .backends.memory import LEAST_CONTEXT, check_fits, estimate
from .backends.native import NativeBackend
from .backends.reference import ReferenceBackend
from .cache import CacheOption, cache_kind
from .config import ModelConfig
from .controller import MAX_DRAFT, Controller
from .costs import kept_shape
from .decode import Decoder, Request
from .drafters import (
    BlockDrafter,
    DatastoreDrafter,
    Drafter,
    DraftModelDrafter,
    HeadDrafter,
    NgramDrafter,
    SuffixDrafter,
)
from .drafters.datastore import open_for
from .engine import Engine
from .json_file import read_json
from .models.loading import LoadedModel, load_model
from .models.quantise import Precision, check_precision
from .sampling import generation_defaults
from .self_draft import RULE, kept_layers, pays, self_draft, smaller
from .text.stream import TextStream
from .text.template import ChatTemplate, encode_chat
from .text.tokenizer import Tokenizer, same_vocabulary
from .types import F32, ModelError, Round, SampleOpts, Stats, TokenLogprobs, UsageError
from .weights.relaid import Relaid
from .weights.tensor import Tensor

DEFAULT_MODEL = "smollm2-135m"
HEADS = ("mtp", "eagle3", "dflash")
DRAFTERS = ("auto", *HEADS, "draft_model", "self", "ngram", "suffix", "datastore", "none")
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Result:
    """One finished answer.

    text: without end tokens and stop strings. token_ids: every emitted token, an end token included.
    finish_reason: "stop", "length" or "cancelled". logprobs: one per token where SampleOpts.logprobs asked for them.
    seed: the one that was used, so that the answer can be repeated. rounds: one entry for each target pass.
    taps: tap -> float32 [prompt and emitted tokens but the last, hidden_size], where asked for.
    """

    text: str
    token_ids: list[int]
    prompt_ids: list[int]
    finish_reason: str
    seed: int
    stats: Stats
    rounds: list[Round]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    taps: dict[int, F32] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Delta:
    """What one round added to a stream: text that is final, its tokens, how many of them were accepted drafts.

    result: the whole answer, with the last delta.
    """

    text: str
    token_ids: list[int]
    accepted: int
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    result: Result | None = None


def load(
    model: str | Path = DEFAULT_MODEL,
    *,
    precision: Precision = "int8",
    draft: str = "auto",
    head: str | Path | None = None,
    draft_model: str | Path | None = None,
    datastore: str | Path | None = None,
    draft_tokens: int | None = None,
    draft_layers: int | None = None,
    context: int | None = None,
    kv_cache: CacheOption = "auto",
    slots: int = 16,
    threads: int | None = None,
    backend: Literal["native", "reference"] = "native",
    cache: bool = True,
    offline: bool = False,
    progress: bool = True,
) -> LanguageModel:
    """Loads a model: a built-in name, a Hugging Face id, a folder or a .gguf file.

    precision: "int8" keeps a quantised file's values and rounds others to 8 bits in groups of 32; "int4" rounds what
    has more than 4 bits to 4; "f32" computes in float32; "bf16" does so with weights of 2 bytes: those of F16 and
    BF16 files as they are, F32 and FP8 rounded to bfloat16. draft: "auto", "mtp", "eagle3", "dflash", "draft_model",
    "self", "ngram", "suffix", "datastore" or "none"; "auto" takes the text itself, and beside it the head, given or
    inside the model, the draft model and the datastore where they are given; with neither head nor draft model "self",
    where that can be expected to pay (self_draft.py). head: a learned draft head made for the model, a folder, a file
    or a Hugging Face id; draft="mtp" finds one inside the model, too. draft_model: the model that drafts; "self": the
    model's own weights at 4 bits, held a second time, and the text. datastore: a file of `outpace index`.
    draft_tokens: always draft this many (0 .. 15), from the head or draft model where there is one, instead of deciding
    by evidence. draft_layers: how many of its layers "self" keeps; all by default. context: tokens a request may hold,
    prompt and answer; the model's own limit by default. kv_cache: how keys and values of past tokens are held: "f32",
    "f16", "q8" (8 bits: half of f16's memory), or "auto": f32 when precision is "f32", else f16. slots: requests at
    once. backend: "native", or "reference" for the slow NumPy oracle. cache: keep the weights as the kernels read them
    on the disk (hub.relaid), so that the next load only maps them; the results are the same. offline, progress: as
    hub.resolve, for a model that is not on this machine yet. What is odd about a model but no error is a warning.

    Raises UsageError, HubError, ModelError, or CapacityError when memory does not suffice.
    """
    if draft not in DRAFTERS:
        raise UsageError(f"draft must be one of {', '.join(DRAFTERS)}, got {draft!r}")
    if head is not None and draft not in ("auto", *HEADS):
        raise UsageError(f"a head goes with draft='auto', 'mtp', 'eagle3' or 'dflash', not with {draft!r}")
    if draft in HEADS[1:] and head is None:
        raise UsageError(f"draft={draft!r} needs head=PATH, a head of that kind made for this model")
    if draft_model is not None and draft not in ("auto", "draft_model"):
        raise UsageError(f"a draft model goes with draft='auto' or 'draft_model', not with {draft!r}")
    if draft == "draft_model" and draft_model is None:
        raise UsageError("draft='draft_model' needs draft_model=NAME")
    if datastore is not None and draft not in ("auto", "datastore"):
        raise UsageError(f"a datastore goes with draft='auto' or 'datastore', not with {draft!r}")
    if draft == "datastore" and datastore is None:
        raise UsageError("draft='datastore' needs datastore=FILE, made by `outpace index`")
    if draft_layers is not None and draft != "self":
        raise UsageError(f"draft_layers goes with draft='self', not with {draft!r}")
    if draft_tokens is not None and not (isinstance(draft_tokens, int) and 0 <= draft_tokens <= MAX_DRAFT):
        raise UsageError(f"draft_tokens must be in 0 .. {MAX_DRAFT}, got {draft_tokens!r}")
    check_precision(precision)
    cache_kind(kv_cache, precision)
    if backend not in ("native", "reference"):
        raise UsageError(f"backend must be native or reference, got {backend!r}")
    if not isinstance(cache, bool):
        raise UsageError(f"cache must be True or False, got {cache!r}")
    if context is not None and not isinstance(context, int):
        raise UsageError(f"context must be a whole number, got {context!r}")

    def open_backend(
        loaded: LoadedModel, positions: int | None, precision: Precision, variant: str = "", beside: int = 0
    ) -> Backend:
        if positions is not None and not 1 <= positions <= loaded.config.max_position_embeddings:
            limit = loaded.config.max_position_embeddings
            raise UsageError(f"context must be in 1 .. {limit} for {loaded.path}, got {positions}")
        if backend == "reference":
            return ReferenceBackend(
                loaded.config,
                loaded.weights,
                precision=precision,
                slots=slots,
                positions=positions,
                kv_cache=kv_cache,
            )
        check_fits(loaded.path, loaded.config, loaded.weights, precision, positions, kv_cache, beside)
        return NativeBackend(
            loaded.config,
            loaded.weights,
            precision=precision,
            slots=slots,
            positions=positions,
            threads=threads,
            kv_cache=kv_cache,
            relaid=Relaid(hub.relaid(loaded.path), loaded.path, variant=variant) if cache else None,
        )

    def open_files(name: str | Path) -> LoadedModel:
        loaded = load_model(hub.resolve(name, offline=offline, progress=progress))
        for notice in loaded.notices:
            warnings.warn(notice, stacklevel=3)
        return loaded

    loaded = open_files(model)
    if draft == "mtp" and head is None and not loaded.head:
        raise UsageError(f"draft='mtp' needs head=PATH: {model} has no head inside")
    tokenizer = load_tokenizer(loaded)
    corpus = None if datastore is None else DatastoreDrafter(open_for(datastore, tokenizer, str(model)))
    small: LoadedModel | None = None  # the model that drafts, if one does, its arithmetic and what it is kept as
    small_precision, variant, alone = precision, "", head is None and not loaded.head
    if draft_model is not None:
        small = open_files(draft_model)
        difference = same_vocabulary(tokenizer, load_tokenizer(small))
        if difference is not None:
            raise UsageError(f"{draft_model} cannot draft for {model}: {difference}")
    elif draft == "self" or (
        draft == "auto" and alone and backend == "native" and cache and pays(loaded, precision, kv_cache)
    ):
        layers = kept_layers(loaded.config.num_hidden_layers, draft_layers)
        small = self_draft(load_model(loaded.path), tokenizer, layers)
        small_precision, variant = "int8", f"self {RULE} {layers}"
        if not smaller(small, loaded, precision):
            raise UsageError(f"draft='self' drafts at 4 bits, which {model} has already: use another drafter")
    beside = 0
    if small is not None:
        least = min(LEAST_CONTEXT, small.config.max_position_embeddings)
        beside = estimate(small.config, small.weights, small_precision, min(context or least, least), kv_cache).total
    target = open_backend(loaded, context, precision, beside=beside)
    drafters: list[Drafter] = []  # the main one first
    if head is not None:
        path = Path(head) if Path(head).exists() else hub.resolve(head, offline=offline, progress=progress)
        drafters.append(open_head(path, loaded, target, draft))
    elif loaded.head and draft in ("auto", "mtp"):
        try:
            drafters.append(open_head(loaded.path, loaded, target, draft))
        except ModelError as error:
            if draft == "mtp":
                raise
            warnings.warn(f"the draft head inside the model is not used: {error}", stacklevel=2)
    if small is not None:
        positions = min(target.capacity.positions, small.config.max_position_embeddings)
        drafter = open_backend(small, positions, small_precision, variant)
        drafters.append(DraftModelDrafter(drafter, "draft_model" if draft_model is not None else "self"))
    if draft in ("auto", "self", "suffix"):  # the suffix automaton finds what n-grams find
        drafters.append(SuffixDrafter())
    elif draft == "ngram":
        drafters.append(NgramDrafter())
    if corpus is not None:
        drafters.append(corpus)
    shape = None
    if drafters and draft_tokens is None:
        how = f"{target.isa}, {target.threads} threads" if isinstance(target, NativeBackend) else backend
        kept = hub.relaid(loaded.path) / "costs.json" if cache else None
        when = loaded.path.stat().st_mtime_ns
        shape = kept_shape(target, kept, f"{precision}, {kv_cache} cache, {how}, of {when}")
    return LanguageModel(
        target,
        tokenizer,
        drafters=drafters,
        draft_tokens=draft_tokens,
        shape=shape,
        template=load_template(loaded, tokenizer),
        defaults=load_defaults(loaded),
        name=str(model),
    )


def open_head(path: Path, loaded: LoadedModel, target: Backend, draft: str = "auto") -> Drafter:
    """The drafter with the learned head at `path`, which runs beside its target. draft: the algorithm that it must be
    of, or "auto". Raises UsageError for another one, ModelError for a head that does not fit the model."""
    from .backends.running_head import run_head
    from .heads.loading import borrowed, load_head

    head = load_head(path, loaded.config)
    kind = head.config.algorithm
    if draft not in ("auto", kind):
        raise UsageError(f"{path} is a head of kind {kind}, not {draft}: use draft={kind!r}")
    own = {name: head.weights.take_tensor(name) for name in head.weights.keys()}  # noqa: SIM118

    def borrow() -> dict[str, Tensor]:  # the target took its own
        return borrowed(head.config, load_model(loaded.path).weights, loaded.config)

    running = run_head(target, head.config, own, borrow, head.d2t)
    return BlockDrafter(running) if kind == "dflash" else HeadDrafter(running)


def load_tokenizer(loaded: LoadedModel) -> Tokenizer:
    """The model's tokenizer, from the GGUF file's metadata or the folder's tokenizer.json. Raises ModelError."""
    return Tokenizer.from_folder(loaded.path) if loaded.metadata is None else Tokenizer.from_gguf(loaded.metadata)


def load_template(loaded: LoadedModel, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The model's chat template, None where it has none. Raises ModelError."""
    if loaded.metadata is None:
        return ChatTemplate.from_folder(loaded.path)
    return ChatTemplate.from_gguf(loaded.metadata, tokenizer)


def load_defaults(loaded: LoadedModel) -> dict[str, Any]:
    """Sampling defaults of the model's authors: generation_config.json beside the weights; {} where there is none.

    Raises ModelError for a value that cannot be right.
    """
    folder = loaded.path if loaded.path.is_dir() else loaded.path.parent
    file = folder / "generation_config.json"
    try:
        return generation_defaults(read_json(file, missing={}))
    except UsageError as error:
        raise ModelError(f"{file}: {error}") from None


class LanguageModel:
    """A loaded model with its tokenizer, drafter and engine.

    Threads may share it; their requests share the passes. After a fork only the parent may go on with it.
    """

    def __init__(
        self,
        target: Backend,
        tokenizer: Tokenizer | None,
        *,
        drafters: Sequence[Drafter] = (),
        draft_tokens: int | None = None,
        shape: Mapping[int, float] | None = None,
        template: ChatTemplate | None = None,
        defaults: Mapping[str, Any] | None = None,
        name: str = "",
    ) -> None:
        """Puts a model together from its parts; `load` does it from files. Without a tokenizer it speaks token ids.

        drafters: the main one first, see Decoder. shape: what passes of some row counts cost, see costs.py.
        """
        self.target = target
        self.tokenizer = tokenizer
        self.drafters = tuple(drafters)
        self.template = template
        self.defaults = dict(defaults or {})
        self.name = name
        self._closed = False
        ends = set(target.config.eos_token_ids)
        if tokenizer is not None and tokenizer.eos_id is not None:
            ends.add(tokenizer.eos_id)
        self.engine = Engine(
            Decoder(target, drafters, Controller(draft_tokens, shape)),
            end_tokens=frozenset(ends),
            known_tokens=tokenizer.known_tokens if tokenizer is not None else None,
        )

    def __repr__(self) -> str:
        drafters = " and ".join(drafter.name for drafter in self.drafters) or "none"
        shape = f"{self.config.architecture}, {self.config.num_hidden_layers} layers"
        closed = ", closed" if self._closed else ""
        return (
            f"<LanguageModel {self.name or 'without a name'}: {shape}, context {self.target.capacity.positions}, "
            f"drafter {drafters}{closed}>"
        )

    @property
    def config(self) -> ModelConfig:
        return self.target.config

    # -- one answer

    def generate(self, prompt: str | Sequence[int], opts: SampleOpts | None = None, **more: Any) -> Result:
        """Continues a prompt (text as it is, or token ids). more: fields of SampleOpts, speculate=False, taps=(...).

        Raises UsageError (ContextError when prompt and answer do not fit) or NumericalError.
        """
        return self.generate_many([prompt], opts, **more)[0]

    def generate_many(
        self,
        prompts: Sequence[str | Sequence[int]],
        opts: SampleOpts | Sequence[SampleOpts] | None = None,
        *,
        speculate: bool = True,
        taps: Sequence[int] = (),
        **changes: Any,
    ) -> list[Result]:
        """Continues many prompts, as many at once as there are slots; each answer is the one it would get alone.

        opts: for all prompts, or one each. taps: hidden states wanted in Result.taps (see backends/base.py).
        """
        if isinstance(prompts, (str, bytes)):
            raise UsageError("generate_many takes a list of prompts; give one prompt to generate")
        prompts = list(prompts)
        each = [opts] * len(prompts) if opts is None or isinstance(opts, SampleOpts) else list(opts)
        if len(each) != len(prompts):
            raise UsageError(f"{len(prompts)} prompts but {len(each)} options")
        requests: list[Request] = []
        try:
            for prompt, o in zip(prompts, each, strict=True):
                requests.append(self._submit(prompt, o, speculate, taps, changes))
            self.engine.run(requests)
        finally:
            for request in requests:
                self.engine.cancel(request)
        return [self._result(request) for request in requests]

    def stream(
        self,
        prompt: str | Sequence[int],
        opts: SampleOpts | None = None,
        *,
        speculate: bool = True,
        taps: Sequence[int] = (),
        **changes: Any,
    ) -> Generator[Delta]:
        """Like `generate`, a Delta per round. Closing the iterator (or Ctrl-C) cancels; the model stays usable."""
        deltas = self._deltas(self._submit(prompt, opts, speculate, taps, changes))
        next(deltas)  # it has begun: from here on, dropping it cancels the request too
        return deltas

    def _deltas(self, request: Request) -> Generator[Delta]:
        shown = logged = rounds = 0
        try:
            yield Delta("", [], 0)
            while True:
                # The engine may have worked on this request before, on behalf of another one.
                with self.engine.lock:
                    if not request.finish and len(request.output) == shown:
                        self.engine.step()
                    if request.error is not None:
                        raise request.error
                    output, logprobs = request.output, list(request.logprobs)
                    if len(output) == shown and not request.finish:
                        continue
                    text = request.text.take() if isinstance(request.text, TextStream) else ""
                    accepted = sum(each.accepted for each in request.rounds[rounds:])
                    rounds = len(request.rounds)
                    result = self._result(request) if request.finish else None
                yield Delta(text, output[shown:], accepted, logprobs[logged:], result)
                shown, logged = len(output), len(logprobs)
                if result is not None:
                    return
        finally:
            self.engine.cancel(request)

    # -- chat

    def chat(self, messages: Messages, opts: SampleOpts | None = None, **more: Any) -> Result:
        """Answers a conversation: [{"role": "user", "content": "..."}, ...]. more: as `generate`, and tools=[...],
        template={...} for variables of the chat template such as enable_thinking.

        Raises UsageError for messages that are malformed, or when the model has no chat template.
        """
        prompt, more = self._prompt(messages, more)
        return self.generate(prompt, opts, **more)

    def chat_stream(self, messages: Messages, opts: SampleOpts | None = None, **more: Any) -> Generator[Delta]:
        """Like `chat`, a Delta per round."""
        prompt, more = self._prompt(messages, more)
        return self.stream(prompt, opts, **more)

    def chat_ids(self, messages: Messages, *, tools: Any = None, **variables: Any) -> list[int]:
        """The prompt's token ids for a conversation. Control tokens typed into a message's content stay plain text."""
        if self.template is None or self.tokenizer is None:
            raise UsageError(f"{self.name or 'this model'} has no chat template: use generate with plain text")
        return encode_chat(self.tokenizer, self.template, messages, tools=tools, **variables)

    def _prompt(self, messages: Messages, more: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        rest = {k: v for k, v in more.items() if k not in ("tools", "template")}
        variables = more.get("template") or {}
        if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
            raise UsageError("template must be a map from variable names to values")
        if taken := sorted({"messages", "tools"} & variables.keys()):
            raise UsageError(f"template variable {taken[0]} is an argument of its own")
        return self.chat_ids(messages, tools=more.get("tools"), **variables), rest

    # -- between text and requests

    def _submit(
        self,
        prompt: str | Sequence[int],
        opts: SampleOpts | None,
        speculate: bool,
        taps: Sequence[int],
        changes: Mapping[str, Any],
    ) -> Request:
        if self._closed:
            raise UsageError("the model is closed: load it again")
        if opts is not None and not isinstance(opts, SampleOpts):
            raise UsageError(f"opts must be a SampleOpts, got {type(opts).__name__}")
        unknown = changes.keys() - {f.name for f in fields(SampleOpts)}
        if unknown:
            raise UsageError(f"unknown sampling parameter: {', '.join(sorted(unknown))}")
        opts = replace(opts or SampleOpts(), **changes).with_defaults(self.defaults)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UsageError("this model has no tokenizer: give token ids")
            prompt = self.tokenizer.encode(prompt)
        text = TextStream(self.tokenizer.stream(), opts.stop) if self.tokenizer is not None else None
        return self.engine.submit(prompt, opts, text=text, taps=taps, speculate=speculate)

    def _result(self, request: Request) -> Result:
        return Result(
            text=request.text.text if isinstance(request.text, TextStream) else "",
            token_ids=request.output,
            prompt_ids=list(request.prompt),
            finish_reason=request.finish,
            seed=request.sampler.noise.seed,
            stats=request.stats,
            rounds=request.rounds,
            logprobs=request.logprobs,
            taps={tap: np.concatenate(rows) for tap, rows in request.tapped.items()},
        )

    # -- life

    def close(self) -> None:
        """Frees the slots. The model cannot be used afterwards."""
        self._closed = True
        self.engine.close()
        for drafter in self.drafters:
            drafter.close()

    def __enter__(self) -> LanguageModel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

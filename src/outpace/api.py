"""The Python API: `load` a model, then `generate`, `generate_many`, `stream` or `chat`.

    import outpace
    model = outpace.load("smollm2-135m")
    print(model.chat([{"role": "user", "content": "Why is the sky blue?"}]).text)

Neighbours: opening.py opens what a name means, engine.py runs the requests; here text becomes tokens and requests
become results.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

from .backends.base import Backend
from .cache import CacheOption
from .config import ModelConfig
from .controller import MAX_DRAFT, Controller
from .decode import Decoder, Request
from .drafters import Drafter
from .engine import Engine
from .models.quantise import Precision
from .opening import Options, open_model
from .text.stream import TextStream
from .text.template import ChatTemplate, encode_chat
from .text.tokenizer import Tokenizer
from .types import F32, Round, SampleOpts, Stats, TokenLogprobs, UsageError

DEFAULT_MODEL = "smollm2-135m"
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


def result_of(request: Request) -> Result:
    """What a finished request came to."""
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


class Answer:
    """An answer in the making. `LanguageModel.stream` iterates over it; a server steps the engine itself and asks for
    what is new."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine, self._request = engine, request
        self._shown = self._logged = self._rounds = 0

    @property
    def finished(self) -> bool:
        return bool(self._request.finish)

    def news(self) -> Delta | None:
        """What came since the last call, the whole answer with the last of it; None for nothing new. The engine's lock
        is held by the caller. Raises the request's own error."""
        request = self._request
        if request.error is not None:
            raise request.error
        output, finished = request.output, bool(request.finish)
        if len(output) == self._shown and not finished:
            return None
        logprobs = request.logprobs[self._logged :]
        delta = Delta(
            request.text.take() if isinstance(request.text, TextStream) else "",
            output[self._shown :],
            sum(each.accepted for each in request.rounds[self._rounds :]),
            logprobs,
            result_of(request) if finished else None,
        )
        self._shown, self._rounds = len(output), len(request.rounds)
        self._logged += len(logprobs)
        return delta

    def cancel(self) -> None:
        """Ends it where it is; nothing happens to a finished one."""
        self._engine.cancel(self._request)


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
    has more than 4 bits to 4; "f32" computes in float32; "bf16" does so with weights of 2 bytes: those of F16 and BF16
    files as they are, F32 and FP8 rounded to bfloat16. draft: "auto", "mtp", "eagle3", "dflash", "draft_model", "self",
    "ngram", "suffix", "datastore" or "none"; "auto" takes the text itself, and beside it the head, given, inside the
    model or coming with outpace for it (heads/boxed.py), the draft model and the datastore where they are given, else
    "self" where that can be expected to pay (self_draft.py). Any other draws on that source alone, but for "self",
    which has the text beside it. head: a learned draft head made for the model, a folder, a file or a Hugging Face id;
    "none": no head, not even one inside the model or coming with outpace.
    draft_model: the model that drafts; "self": the model's own weights at 4 bits, held a second time, and the text.
    datastore: a file of `outpace index`. draft_tokens: always draft this many (0 .. 15), from the head or draft model
    where there is one, instead of deciding by evidence; for 0 no drafter is opened. draft_layers: how many of its
    layers "self" keeps; all by default. context: tokens a request may hold, prompt and answer; the model's own limit by
    default. kv_cache: how keys and values of past tokens are held: "f32", "f16", "q8" (8 bits: half of f16's memory),
    or "auto": f32 when precision is "f32", else f16. slots: requests at once. backend: "native", or "reference" for the
    slow NumPy oracle. cache: keep the weights as the kernels read them on the disk (hub.relaid), so that the next load
    only maps them; the results are the same. offline, progress: as hub.resolve, for a model that is not on this machine
    yet. What is odd about a model but no error is a warning.

    Raises UsageError, HubError, ModelError, or CapacityError when memory does not suffice.
    """
    options = Options(
        model=model,
        precision=precision,
        draft=draft,
        head=head,
        draft_model=draft_model,
        datastore=datastore,
        draft_tokens=draft_tokens,
        draft_layers=draft_layers,
        context=context,
        kv_cache=kv_cache,
        slots=slots,
        threads=threads,
        backend=backend,
        cache=cache,
        offline=offline,
        progress=progress,
    )
    parts = open_model(options)
    return LanguageModel(
        parts.target,
        parts.tokenizer,
        drafters=parts.drafters,
        draft_tokens=draft_tokens,
        shape=parts.shape,
        template=parts.template,
        defaults=parts.defaults,
        name=str(model),
    )


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
    def stats(self) -> Stats:
        """What all answers so far came to together, each shared pass counted once."""
        return self.engine.decoder.total

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
        return [result_of(request) for request in requests]

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
        deltas = self._deltas(self.submit(prompt, opts, speculate=speculate, taps=taps, **changes))
        next(deltas)  # it has begun: from here on, dropping it cancels the request too
        return deltas

    def submit(
        self,
        prompt: str | Sequence[int],
        opts: SampleOpts | None = None,
        *,
        speculate: bool = True,
        taps: Sequence[int] = (),
        drafter: str | None = None,
        most_drafted: int = MAX_DRAFT,
        **changes: Any,
    ) -> Answer:
        """Like `stream`, for whoever steps the engine: nothing is computed until engine.step() is called. drafter,
        most_drafted: see Engine.submit."""
        request = self._submit(prompt, opts, speculate, taps, changes, drafter=drafter, most_drafted=most_drafted)
        return Answer(self.engine, request)

    def _deltas(self, answer: Answer) -> Generator[Delta]:
        try:
            yield Delta("", [], 0)
            while True:
                # The engine may have worked on this request before, on behalf of another one.
                with self.engine.lock:
                    delta = answer.news()
                    if delta is None:
                        self.engine.step()
                        continue
                yield delta
                if delta.result is not None:
                    return
        finally:
            answer.cancel()

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
        **drafting: Any,
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
        return self.engine.submit(prompt, opts, text=text, taps=taps, speculate=speculate, **drafting)

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

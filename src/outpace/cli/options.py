"""The options that commands share, as dataclasses whose fields are the options (command.py spells them out).

Values are checked by the library (SampleOpts, `load`), so that the command line and Python agree.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

DEFAULT_MODEL = "smollm2-135m"  # as api.DEFAULT_MODEL, whose import takes its time

if TYPE_CHECKING:
    from ..api import LanguageModel
    from ..types import SampleOpts


def _sampling(help: str, *names: str, metavar: str | None = None, default: str | bool = True) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, show_default=default, rich_help_panel="Sampling")


def _model(help: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel="Model and speed")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. What is not said comes from the model's generation_config.json."""

    temperature: Annotated[
        float | None, _sampling("0: always the most probable token.", default="the model's, else 0")
    ] = None
    top_k: Annotated[int | None, _sampling("Only the K most probable tokens.")] = None
    top_p: Annotated[float | None, _sampling("Only the most probable tokens that sum to P.")] = None
    min_p: Annotated[float | None, _sampling("Only tokens with P times the best one's probability.")] = None
    typical_p: Annotated[float | None, _sampling("Only the most typical tokens that sum to P.")] = None
    repetition_penalty: Annotated[float | None, _sampling("Over 1: tokens of prompt and answer get rarer.")] = None
    presence_penalty: Annotated[float | None, _sampling("Taken off tokens that the answer holds.")] = None
    frequency_penalty: Annotated[float | None, _sampling("Taken off once per occurrence in the answer.")] = None
    logit_bias: Annotated[
        list[str] | None, _sampling("Added to a token's logit; -inf bans it. Repeatable.", metavar="ID=BIAS")
    ] = None
    stop: Annotated[list[str] | None, _sampling("The answer ends before this text. Repeatable.")] = None
    seed: Annotated[int | None, _sampling("Repeats an answer. Without it one is drawn and reported.")] = None
    max_tokens: Annotated[int | None, _sampling("Most tokens of an answer.", default="512; in a chat 1024")] = None
    min_tokens: Annotated[int | None, _sampling("No end of the answer before this many tokens.")] = None
    rule: Annotated[str, _sampling("match (same tokens), rejection or block (same distribution).")] = "match"
    ignore_eos: Annotated[bool, _sampling("Go on after end tokens.", "--ignore-eos")] = False

    def opts(self, **more: Any) -> SampleOpts:
        """The library's options; more: further fields. Raises UsageError for a value out of range."""
        from ..types import SampleOpts

        names = self.__slots__
        values = {name: getattr(self, name) for name in names if name not in ("logit_bias", "stop")}
        return SampleOpts(**values, logit_bias=parse_biases(self.logit_bias), stop=tuple(self.stop or ()), **more)


@dataclass(frozen=True, slots=True)
class Model:
    """Which model, what drafts for it, and what it may use of the machine."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="A built-in name, a Hugging Face id, a folder or a .gguf file.",
            show_default=DEFAULT_MODEL,
        ),
    ] = None
    draft: Annotated[
        str,
        _model(
            "What guesses ahead: auto (whatever there is for the model, and the text itself), or one alone: mtp, "
            "eagle3, dflash, ngram, suffix, datastore, draft_model, self (beside suffix); or none."
        ),
    ] = "auto"
    head: Annotated[
        str | None,
        _model(
            "A learned draft head made for the model (mtp, eagle3, dflash); none: not even the one inside it or coming "
            "with outpace for it.",
            metavar="PATH",
        ),
    ] = None
    draft_model: Annotated[str | None, _model("A small model with the same vocabulary that guesses ahead.")] = None
    datastore: Annotated[
        str | None, _model("A file of `outpace index`: guess from that corpus, too.", metavar="FILE")
    ] = None
    draft_tokens: Annotated[int | None, _model("Guess always this many tokens (0 to 15).", metavar="K")] = None
    draft_layers: Annotated[
        int | None, _model("With --draft self: guess with N of the model's layers.", metavar="N")
    ] = None
    no_speculation: Annotated[bool, _model("Plain decoding: the same tokens, one a pass.", "--no-speculation")] = False
    precision: Annotated[str, _model("Arithmetic: int8, int4, bf16 (weights of 2 bytes) or f32.")] = "int8"
    context: Annotated[int | None, _model("Tokens that prompt and answer may have; saves memory.")] = None
    kv_cache: Annotated[
        str, _model("How past keys and values are held: auto, f32, f16 or q8 (least memory, long contexts faster).")
    ] = "auto"
    threads: Annotated[int | None, _model("Threads; by default one for each fast core.")] = None
    no_cache: Annotated[
        bool, _model("Neither use nor keep the weights as they are laid out for this machine.", "--no-cache")
    ] = False
    offline: Annotated[bool, _model("Never download.", "--offline")] = False

    def load(self, *, quiet: bool = False) -> LanguageModel:
        """quiet: a download goes unmentioned. Raises UsageError, HubError or ModelError."""
        from .. import api
        from ..types import UsageError

        try:
            return api.load(
                DEFAULT_MODEL if self.model is None else self.model,
                precision=self.precision,  # type: ignore[arg-type]  # load checks it
                draft=self.draft,
                head=self.head,
                draft_model=self.draft_model,
                datastore=self.datastore,
                draft_tokens=self.draft_tokens,
                draft_layers=self.draft_layers,
                context=self.context,
                kv_cache=self.kv_cache,  # type: ignore[arg-type]
                slots=1,
                threads=self.threads,
                cache=not self.no_cache,
                offline=self.offline,
                progress=not quiet,
            )
        except UsageError as error:
            raise UsageError(_as_options(str(error))) from None


def _as_options(text: str) -> str:
    """The library's names of its arguments as options: draft='eagle3' needs head=PATH -> --draft eagle3 needs --head
    PATH."""
    names = "|".join(field.name for field in fields(Model))
    return re.sub(
        rf"\b({names})=('?)(\w*)\2", lambda found: f"--{found[1].replace('_', '-')} {found[3]}".rstrip(), text
    )


Think = Annotated[
    bool | None, typer.Option("--think/--no-think", help="Thinking on or off, where the model's template has it.")
]
System = Annotated[str | None, typer.Option("--system", help="The system message.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No statistics, no progress.", rich_help_panel="Other")]


def template_variables(think: bool | None) -> dict[str, Any]:
    """Variables for the chat template; what was not said stays the template's choice."""
    return {} if think is None else {"enable_thinking": think}


def check_think(model: LanguageModel, think: bool | None) -> None:
    """UsageError when thinking was switched on or off for a template that has no such switch."""
    from ..types import UsageError

    if think is not None and (model.template is None or not model.template.mentions("enable_thinking")):
        raise UsageError(f"the chat template of {model.name} has no switch for thinking (enable_thinking)")


def within(model: LanguageModel, opts: SampleOpts, prompt: Sequence[int], limit: int) -> SampleOpts:
    """The options with at most `limit` tokens, fewer where the prompt leaves less of the context."""
    room = model.target.capacity.positions - len(prompt)
    return replace(opts, max_tokens=max(1, min(max(limit, opts.min_tokens or 0), room)))


def parse_biases(entries: list[str] | None) -> dict[int, float] | None:
    """["12=-3.5", "7=-inf"] -> {12: -3.5, 7: -inf}. Raises UsageError."""
    from ..types import UsageError

    biases: dict[int, float] = {}
    for entry in entries or ():
        token, _, bias = entry.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise UsageError(f"--logit-bias wants ID=BIAS, such as 42=-1.5, got {entry!r}") from None
    return biases or None

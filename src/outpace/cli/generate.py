"""`outpace generate`: one prompt, one answer."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Model, Quiet, Sampling, System, Think, check_think, template_variables, within
from .terminal import answering, counted, note, statistics, styled

if TYPE_CHECKING:
    from ..api import LanguageModel, Result
    from ..text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 512


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt. '-', or none with input piped in: read stdin.", show_default=False)
    ] = None,
    *,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")] = None,
    model: Model,
    system: System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    think: Think = None,
    sampling: Sampling,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: logprobs of the chosen and the N best tokens.", metavar="N")
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Afterwards mark the accepted drafts in the answer, and say what they gave."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel="Other")] = False,
    quiet: Quiet = False,
) -> None:
    """Answers one prompt.

    The prompt is put into the model's chat template where it has one. A prompt from a file or stdin loses its last
    line break.
    """
    from ..types import UsageError

    opts = sampling.opts(logprobs=logprobs)
    if logprobs is not None and not as_json:
        raise UsageError("--logprobs needs --json")
    if explain and as_json:
        raise UsageError("--explain is for people; --json has the same figures under stats")
    text = read_prompt(prompt, file)
    if not text:
        raise UsageError("the prompt is empty")
    with model.load(quiet=quiet or as_json) as loaded:
        if raw or loaded.template is None:
            if system is not None or think is not None:
                raise UsageError("--system and --think need a chat template (and no --raw)")
            assert loaded.tokenizer is not None  # load always brings one
            ids = loaded.tokenizer.encode(text)
        else:
            check_think(loaded, think)
            messages = [{"role": "system", "content": system}] if system is not None else []
            ids = loaded.chat_ids([*messages, {"role": "user", "content": text}], **template_variables(think))
        if opts.max_tokens is None:
            opts = within(loaded, opts, ids, DEFAULT_MAX_TOKENS)
        if as_json:
            answer = loaded.generate(ids, opts, speculate=not model.no_speculation)
            print(json.dumps(as_object(loaded, answer), ensure_ascii=sys.stdout.encoding.lower() != "utf-8"))
            return
        result: Result | None = None
        tokens = rounds = 0
        try:
            stream = loaded.stream(ids, opts, speculate=not model.no_speculation)
            with contextlib.closing(stream) as deltas, answering() as show:
                for delta in deltas:
                    show(delta.text)
                    tokens += len(delta.token_ids)
                    rounds += bool(delta.token_ids)
                    result = delta.result
        except KeyboardInterrupt:
            note(f"(stopped) {counted(tokens, 'token')} in {counted(rounds, 'round')}" if not quiet else "(stopped)")
            raise typer.Exit(130) from None
        if explain and result is not None:
            assert loaded.tokenizer is not None
            explained(result, loaded.tokenizer)
        elif not quiet and result is not None:
            sampled = opts.with_defaults(loaded.defaults).temperature != 0
            note(statistics(result) + (f", seed {result.seed}" if sampled else ""))


def explained(result: Result, tokenizer: Tokenizer) -> None:
    """Prints the answer again, drafts marked, and the figures."""
    from .explain import marked, summary

    print(f"\n{marked(result, tokenizer, colour=styled(sys.stdout))}\n\n{summary(result)}", flush=True)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, the file or stdin. Raises UsageError when there is none, two, or it is no text."""
    from ..types import UsageError

    if file is not None:
        if prompt is not None:
            raise UsageError("give a prompt or --file, not both")
        try:
            return _text(file.read_bytes(), str(file))
        except OSError as error:
            raise UsageError(f"{file}: {error.strerror}") from None
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise UsageError('no prompt: give one, as in outpace generate "Why is the sky blue?"')
    return _text(sys.stdin.buffer.read(), "stdin")


def _text(data: bytes, where: str) -> str:
    from ..types import UsageError

    try:
        return data.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: not UTF-8 text at byte {error.start}") from None


def as_object(model: LanguageModel, result: Result) -> dict[str, Any]:
    """What --json prints."""
    stats = result.stats
    shares = ("tokens_per_round", "tokens_per_second", "acceptance", "rounds_by_accepted", "rest_s")
    found: dict[str, Any] = {
        "text": result.text,
        "token_ids": result.token_ids,
        "prompt_tokens": len(result.prompt_ids),
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "model": model.name,
        "rounds": [each._asdict() for each in result.rounds],
        "stats": asdict(stats) | {name: getattr(stats, name) for name in shares},
    }
    if result.logprobs:
        found["logprobs"] = [asdict(entry) for entry in result.logprobs]
    return found

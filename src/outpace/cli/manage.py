"""`outpace pull`, `models`, `rm` and `info`: the models on this machine."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .terminal import note, show

if TYPE_CHECKING:
    from ..models.loading import LoadedModel

Name = Annotated[
    str,
    typer.Argument(help="A built-in name, or org/name[@revision][:file.gguf] on the Hugging Face Hub."),
]
Offline = Annotated[bool, typer.Option("--offline", help="Never download.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def pull(
    name: Name,
    *,
    offline: Offline = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing but errors.")] = False,
) -> None:
    """Fetches a model, or what is missing of it. A broken download goes on where it stopped."""
    from .. import hub

    path = hub.pull(name, progress=not quiet, offline=offline)
    if not quiet:
        note(f"{name} is at {path}")


def models(*, as_json: AsJson = False) -> None:
    """Lists the models on this machine."""
    from .. import hub
    from ..types import size

    found = hub.list_models()
    if as_json:
        rows = [{"name": m.name, "bytes": m.bytes, "kind": m.kind, "path": str(m.path)} for m in found]
        show(json.dumps(rows, indent=2) + "\n")
    elif not found:
        note(f"no models yet: run `outpace pull {next(iter(hub.BUILT_IN))}`")
    else:
        table = [("NAME", "SIZE", "KIND", "PATH"), *((m.name, size(m.bytes), m.kind, str(m.path)) for m in found)]
        widths = [max(len(row[i]) for row in table) for i in range(3)]
        for row in table:
            show("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) + "\n")


def rm(name: Annotated[str, typer.Argument(help="The name that `outpace models` shows.")]) -> None:
    """Removes a model from this machine."""
    from .. import hub

    hub.remove(name)
    note(f"removed {name}")


def info(
    model: Annotated[str, typer.Argument(help="A name, a folder or a .gguf file.")],
    *,
    precision: Annotated[
        str, typer.Option(help="Tell the memory for this arithmetic: int8, int4, bf16 or f32.")
    ] = "int8",
    context: Annotated[int | None, typer.Option(help="... and for this many tokens, prompt and answer.")] = None,
    kv_cache: Annotated[str, typer.Option(help="... held as auto, f32, f16 or q8.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Shows what a model is: architecture, parameters, kinds of tensors, sizes, and what memory it needs."""
    from .. import hub
    from ..models.loading import load_model
    from ..models.quantise import check_precision
    from ..types import UsageError, size

    check_precision(precision)
    loaded = load_model(hub.resolve(model, download=False))
    if context is not None and not 1 <= context <= loaded.config.max_position_embeddings:
        raise UsageError(f"context must be in 1 .. {loaded.config.max_position_embeddings}, got {context}")
    facts = describe(loaded) | {"memory": memory(loaded, precision, context, kv_cache)}
    if as_json:
        show(json.dumps(facts, indent=2) + "\n")
        return
    shown = {("size" if name == "bytes" else name): value for name, value in facts.items()}
    shown["size"] = size(facts["bytes"])
    shown["tensors"] = ", ".join(f"{kind} x{count}" for kind, count in facts["tensors"].items())
    shown["memory"] = memory_line(facts["memory"])
    width = max(map(len, shown))
    for name, value in shown.items():
        show(f"{name.ljust(width)}  {value}\n")
    for text in loaded.notices:
        note(text)


def describe(loaded: LoadedModel) -> dict[str, Any]:
    """The facts about a model that people ask for; bytes: of its weight files. tensors: how many of each kind."""
    from ..models.names import expected_tensors
    from ..opening import load_tokenizer

    config, path = loaded.config, loaded.path
    weights = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    facts = {
        "path": str(path),
        "format": loaded.format,
        "architecture": config.architecture,
        "parameters": sum(map(math.prod, expected_tensors(config).values())),
        "bytes": sum(file.stat().st_size for file in weights),
        "tensors": dict(loaded.weights.kinds().most_common()),
        "tokenizer": f"byte-level BPE, {load_tokenizer(loaded).vocab_size} tokens",
        "context": config.max_position_embeddings,
        "vocabulary": config.vocab_size,
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "mlp": config.intermediate_size,
    }
    if config.num_experts:
        facts |= {"experts": config.num_experts, "experts_used": config.num_experts_used}
    return facts


def memory(loaded: LoadedModel, precision: str, context: int | None, kv_cache: str) -> dict[str, Any]:
    """What the loaded model will hold, in bytes, and whether this machine has it (None: not known).

    head: what its head adds, inside or coming with outpace, which drafts unless another one is asked for; None where
    there is none or it is damaged. self_draft: what --draft self adds; None where the model has 4 bits already. total:
    the head included.
    """
    from ..backends.memory import available_memory, estimate
    from ..self_draft import MOST
    from ..self_draft import memory as self_memory

    need = estimate(loaded.config, loaded.weights, precision, context, kv_cache)  # type: ignore[arg-type]
    head = _head_memory(loaded, precision, need.context, kv_cache)
    total = need.total + (head or 0)
    draft, available = self_memory(loaded, context, kv_cache), available_memory()  # type: ignore[arg-type]
    return {
        "precision": precision,
        "kv_cache": need.kv_cache,
        "context": need.context,
        "weights": need.weights,
        "cache_per_token": need.cache_per_token,
        "cache": need.cache,
        "activations": need.activations,
        "head": head,
        "total": total,
        "self_draft": draft.total if draft.weights <= MOST * need.weights else None,
        "available": available,
        "fits": None if available is None else total <= available,
    }


def _head_memory(loaded: LoadedModel, precision: str, context: int, kv_cache: str) -> int | None:
    from ..opening import head_memory, own_head
    from ..types import ModelError

    try:
        head = own_head(loaded)
    except ModelError as error:
        note(f"the draft head {'inside the model' if loaded.head else 'in the box'} is not used: {error}")
        return None
    return None if head is None else head_memory(head, loaded, precision, context, kv_cache).total  # type: ignore[arg-type]


def memory_line(need: dict[str, Any]) -> str:
    """The same for people."""
    from ..types import size

    fits = {None: "", True: ", fits", False: f": {size(need['total'] - (need['available'] or 0))} are missing"}
    available = "" if need["available"] is None else f"; {size(need['available'])} are available"
    drafts = "" if need["self_draft"] is None else f"; --draft self adds {size(need['self_draft'])}"
    head = "" if need["head"] is None else f", its draft head {size(need['head'])}"
    cache = f"cache {size(need['cache'])} in {need['kv_cache']}"
    return (
        f"{size(need['total'])} in {need['precision']}: weights {size(need['weights'])}, {cache} for {need['context']} "
        f"tokens ({size(need['cache_per_token'])} each), a pass {size(need['activations'])}{head}{drafts}"
        f"{available}{fits[need['fits']]}"
    )

"""`outpace inspect`: what a learned draft head is, which conventions it is read by, and what a step of it reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .manage import AsJson, Offline
from .terminal import note, show

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ..config import ModelConfig
    from ..heads.loading import LoadedHead
    from ..weights.tensor import Tensor

_LM_HEADS = ("lm_head.weight", "output.weight")  # Hugging Face's name, GGUF's
EMBEDDINGS = ("model.embed_tokens.weight", "token_embd.weight")


def inspect(
    head: Annotated[
        str,
        typer.Argument(
            help="A folder, a .safetensors or .gguf file; or a model that has one, inside or coming with outpace."
        ),
    ],
    *,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The model that it drafts for; not needed where it is inside.")
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(help="Try the conventions that its file leaves open; keep those that draft best."),
    ] = False,
    forget: Annotated[bool, typer.Option(help="Forget what --calibrate kept.")] = False,
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Shows what a learned draft head is: format, sizes, what it taps, and where each convention is from.

    A head that does not fit the model is an error that says why.
    """
    from pathlib import Path

    from .. import hub
    from ..heads import boxed
    from ..heads.loading import open_target
    from ..models.loading import load_model
    from ..opening import check_vocabulary, load_calibrated
    from ..types import UsageError

    path = Path(head)
    if not path.exists():
        path = hub.resolve(head, offline=offline)
    its = path if model is None else hub.resolve(model, offline=offline)
    if model is None and not holds_a_model(path):
        raise UsageError(f"{head}: say which model this head drafts for: --model NAME")
    target, tensors = open_target(its)
    # A model without a head inside: the one that is used when it is run.
    box = boxed.find(its) if model is None else None
    box = None if box is not None and load_model(its).head else box
    path = path if box is None else box.path
    check_vocabulary(path, its)
    if forget:
        from ..calibrate import forget as forget_kept

        forget_kept(path)
    trials = _calibrate(path, its) if calibrate else []
    loaded, kept = load_calibrated(path, target, its)
    facts = describe(loaded, target, tensors)
    for name in facts["conventions"].keys() & kept.keys():  # d2t has none where the file has no such tensor
        facts["conventions"][name]["from"] = "calibrated"
    if calibrate:
        facts["trials"] = trials
    if box is not None:
        used = f"by --draft auto (the default) with {head}"
        facts = {"path": facts["path"], "used": used, "from": box.origin} | facts
    if as_json:
        show(json.dumps(facts, indent=2) + "\n")
        return
    _show(facts)
    for text in loaded.notices:
        note(text)


def holds_a_model(path: Path) -> bool:
    """Whether a whole model is there, perhaps with a head inside, as far as names tell."""
    from ..heads.loading import open_target
    from ..types import ModelError

    try:
        config, tensors = open_target(path)
    except ModelError:
        return False
    return any(name in tensors for name in EMBEDDINGS) and config.num_hidden_layers > 1


def _calibrate(head: Path, model: Path) -> list[dict[str, Any]]:
    """Calibrates; what was tried, in order."""
    import sys

    from .. import api
    from ..calibrate import calibrate

    quiet = not sys.stderr.isatty()
    with api.load(model, draft="none", slots=4, progress=not quiet) as loaded:
        found = calibrate(loaded, model, head, progress=(lambda text: None) if quiet else (lambda text: note(text)))
    return [
        {"conventions": dict(trial.conventions), "tokens_per_round": trial.tokens_per_round, "why": trial.why}
        for trial in found.trials
    ]


def describe(loaded: LoadedHead, target: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The facts about a head. tensors: the target's, by its file's names.

    bytes: of the head's own tensors in its file. step_bytes: what one draft step (dflash: one block) reads of them as
    they are held beside a target in int8, the target's lm_head included where the head has none. target_bytes: what
    a pass of that target reads, all experts of a mixture. memory: what the head needs beside it, for one text as long
    as the target allows.
    """
    from ..backends.memory import estimate_head, held_bytes, step_bytes
    from ..models.quantise import head_precision, held_kind

    config = loaded.config
    lm_head = next((name for name in (*_LM_HEADS, *EMBEDDINGS) if name in tensors), None)
    kind = "F32" if lm_head is None else tensors[lm_head].kind
    matrices = {name: t for name, t in tensors.items() if len(t.shape) > 1}
    read = {name: t for name, t in matrices.items() if name == lm_head or name not in EMBEDDINGS}
    precision = head_precision("int8", [t.kind for name, t in read.items() if name != lm_head], kind)
    need = estimate_head(config, loaded.weights, kind, precision, target.max_position_embeddings)
    step = step_bytes(config, loaded.weights, kind, precision, held_kind(kind, "int8"))
    reads = sum(held_bytes(t.kind, t.shape, "int8") for t in read.values())
    layers = config.layers
    block = config.algorithm == "dflash"
    sizes = {"block_size": config.block_size, "mask_token": config.mask_token} if block else {}
    if config.markov != "none":
        sizes |= {"markov": config.markov, "markov_rank": config.markov_rank}  # type: ignore[dict-item]
    if config.confidence != "none":
        sizes["confidence"] = config.confidence  # type: ignore[assignment]
    conventions = {
        name: {
            "value": loaded.d2t_in_file if name == "d2t" else getattr(config, name),
            "from": origin,
        }
        for name, origin in loaded.origins.items()
    }
    return {
        "path": str(loaded.path),
        "format": loaded.format,
        "algorithm": config.algorithm,
        "layers": layers.num_hidden_layers,
        "layer_kind": layers.architecture,
        "hidden": layers.hidden_size,
        "heads": layers.num_attention_heads,
        "kv_heads": layers.num_key_value_heads,
        "head_dim": layers.head_dim,
        "mlp": layers.intermediate_size,
        "draft_vocabulary": config.draft_vocab_size,
        **sizes,
        "taps": [_tap(tap, target.num_hidden_layers) for tap in config.taps],
        "own_embedding": config.own_embedding,
        "own_lm_head": config.own_lm_head,
        "target": {
            "layers": target.num_hidden_layers,
            "hidden": target.hidden_size,
            "vocabulary": target.vocab_size,
        },
        "bytes": loaded.bytes,
        "step_bytes": step,
        "target_bytes": reads,
        "share": round(step / reads, 4) if reads else None,
        "memory": {
            "precision": need.precision,
            "context": need.context,
            "weights": need.weights,
            "cache": need.cache,
            "total": need.total,
        },
        "conventions": conventions,
    }


def _tap(tap: int, layers: int) -> str:
    return "the embedding" if tap == -1 else "the final norm" if tap == layers else f"the output of layer {tap}"


def _show(facts: dict[str, Any]) -> None:
    from ..types import size

    shown = {name: value for name, value in facts.items() if name not in ("conventions", "share", "trials")}
    shown["taps"] = ", ".join(facts["taps"])
    shown["target"] = ", ".join(f"{value} {name}" for name, value in facts["target"].items())
    for name in ("bytes", "step_bytes", "target_bytes"):
        shown[name] = size(facts[name])
    if facts["share"] is not None:
        unit = "a block" if facts["algorithm"] == "dflash" else "a step"
        shown["step_bytes"] += f" read by {unit}: {100 * facts['share']:.1f} % of a pass of the target"
    need = facts["memory"]
    shown["memory"] = (
        f"needs {size(need['total'])} of memory: weights {size(need['weights'])} in {need['precision']}, cache "
        f"{size(need['cache'])} for {need['context']} tokens, the rest for a pass"
    )
    for name in ("own_embedding", "own_lm_head"):
        shown[name] = "yes" if facts[name] else "no, the target's"
    width = max(map(len, shown))
    for name, value in shown.items():
        show(f"{name.replace('_', ' ').ljust(width)}  {value}\n")
    show("conventions\n")
    for name, entry in facts["conventions"].items():
        value = entry["value"]
        text = "yes" if value is True else "no" if value is False else value
        show(f"  {name} = {list(text) if isinstance(text, tuple) else text}: {entry['from']}\n")
    if "trials" in facts:
        show("tokens a round of a chain of 3, on the model's own answers\n")
        for trial in facts["trials"]:
            score, reading = trial["tokens_per_round"], trial["conventions"]
            text = ", ".join(f"{name} = {value}" for name, value in reading.items()) or "as the file or its format says"
            show(f"  {'  -  ' if score is None else f'{score:.3f}'}  {text}{': ' * bool(trial['why'])}{trial['why']}\n")

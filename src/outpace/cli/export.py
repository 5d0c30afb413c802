"""`outpace export`: a learned draft head in a layout that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .inspect import holds_a_model
from .manage import Offline
from .options import Quiet
from .terminal import note

if TYPE_CHECKING:
    from ..models.loading import LoadedModel


def export(
    head: Annotated[str, typer.Argument(help="A folder, a .safetensors or .gguf file; or a model with a head inside.")],
    *,
    to: Annotated[
        str,
        typer.Option("--to", help="speculators (vLLM), specforge (SafeAILab, SGLang) or gguf (llama.cpp)."),
    ],
    out: Annotated[Path, typer.Option("--out", help="The folder to write, or the .gguf file.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The model that it drafts for; not needed where it is inside.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the matrices: bfloat16, float16, float32; in gguf also q8_0, q4_0.")
    ] = "bfloat16",
    bring: Annotated[
        str,
        typer.Option(
            help="What of the model's goes into the file, where the head has none of its own: none, head (its rows of "
            "a smaller draft vocabulary, without which other programs cannot run it) or all (the embedding too)."
        ),
    ] = "head",
    verifier: Annotated[
        str | None,
        typer.Option(help="The model's name for other programs.", show_default="its Hugging Face id, if it has one"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    offline: Offline = False,
    quiet: Quiet = False,
) -> None:
    """Writes a draft head in another layout.

    What the layout has no place for is refused by name. The file is read back before it is written: outpace drafts with
    it as with the head itself.
    """
    from .. import hub
    from ..heads.export import export_head, with_targets
    from ..heads.loading import borrowed
    from ..models.loading import load_model
    from ..models.names import EMBEDDING, HEAD
    from ..opening import check_vocabulary, load_calibrated
    from ..types import UsageError, size

    if bring not in ("none", "head", "all"):
        raise UsageError(f"--bring must be none, head or all, got {bring!r:.40}")
    path = Path(head) if Path(head).exists() else hub.resolve(head, offline=offline, progress=not quiet)
    its = path if model is None else hub.resolve(model, offline=offline, progress=not quiet)
    if model is None and not holds_a_model(path):
        raise UsageError(f"{head}: say which model this head drafts for: --model NAME")
    target = load_model(its)
    loaded, _ = load_calibrated(path, target.config, its)
    check_vocabulary(path, its)
    weights = {name: loaded.weights.take_tensor(name) for name in loaded.weights.keys()}  # noqa: SIM118
    shared = borrowed(loaded.config, target.weights, target.config)
    rows = loaded.d2t is not None and loaded.config.algorithm != "mtp"  # which no layout has for mtp
    names = {"none": (), "head": (HEAD,) if rows else (), "all": (EMBEDDING, HEAD)}[bring]
    shared = {name: tensor for name, tensor in shared.items() if name in names}
    config, weights = with_targets(loaded.config, weights, loaded.d2t, shared)
    made = export_head(
        out,
        config,
        weights,
        loaded.d2t,
        verifier or hub.upstream(model or head),
        to=to,  # type: ignore[arg-type]  # it checks it
        dtype=dtype,
        target_config=target.config,
        tokenizer=_tokenizer(target) if to == "gguf" else None,
        force=force,
    )
    if not quiet:
        note(f"wrote {out} ({size(sum(t.nbytes for t in made.tensors.values()))}: {len(made.tensors)} tensors)")
    for text in (*loaded.notices, *made.notices):
        note(text)


def _tokenizer(target: LoadedModel) -> dict[str, Any]:
    """The target's, as GGUF has it; nothing where it has none."""
    from ..text.export import tokenizer_metadata

    if target.metadata is not None:
        return {key: value for key, value in target.metadata.items() if key.startswith("tokenizer.")}
    if not (target.path / "tokenizer.json").is_file():
        return {}
    return tokenizer_metadata(target.path, target.config.vocab_size)

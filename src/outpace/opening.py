"""From names and choices to the parts of a language model: its target, tokenizer, template and drafters.

Neighbours: hub.py finds files, models/ and heads/ read them, backends/ run them; api.py puts the parts together.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from . import drafters as ways
from . import hub
from .backends.base import Backend
from .backends.memory import (
    LEAST_CONTEXT,
    Memory,
    available_memory,
    check_fits,
    estimate,
    estimate_head,
    precision_of_heads,
)
from .backends.native import NativeBackend
from .backends.reference import ReferenceBackend
from .cache import CacheOption, cache_kind
from .config import ModelConfig
from .controller import MAX_DRAFT
from .costs import kept_shape
from .drafters.base import Drafter
from .json_file import read_json
from .models.loading import LoadedModel, load_model
from .models.names import EMBEDDING, HEAD
from .models.quantise import Precision, check_precision
from .sampling import generation_defaults
from .self_draft import RULE, kept_layers, pays, self_draft, smaller
from .text.template import ChatTemplate
from .text.tokenizer import Tokenizer, same_vocabulary
from .types import ModelError, UsageError, size
from .weights.gguf import GGUFFile
from .weights.relaid import Relaid
from .weights.tensor import Tensor

if TYPE_CHECKING:
    from .drafters import BlockDrafter, HeadDrafter
    from .heads.loading import LoadedHead

_LEAST_HEAD = 1 << 20  # bytes: a smaller head is laid out again as quickly
HEADS = ("mtp", "eagle3", "dflash")
NO_HEAD = "none"  # as head: neither one inside the model nor one in the box
DRAFTERS = ("auto", *HEADS, "draft_model", "self", "ngram", "suffix", "datastore", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `api.load` was asked for, where the fields are described. Raises UsageError for what makes no sense."""

    model: str | Path
    precision: Precision
    draft: str
    head: str | Path | None
    draft_model: str | Path | None
    datastore: str | Path | None
    draft_tokens: int | None
    draft_layers: int | None
    context: int | None
    kv_cache: CacheOption
    slots: int
    threads: int | None
    backend: Literal["native", "reference"]
    cache: bool
    offline: bool
    progress: bool

    def __post_init__(self) -> None:
        draft = self.draft
        if draft not in DRAFTERS:
            raise UsageError(f"draft must be one of {', '.join(DRAFTERS)}, got {draft!r}")
        if draft in HEADS and self.head == NO_HEAD:
            raise UsageError(f"head={NO_HEAD!r} and draft={draft!r} exclude each other")
        if draft == "draft_model" and self.draft_model is None:
            raise UsageError("draft='draft_model' needs draft_model=NAME, a small model with the same vocabulary")
        if draft == "datastore" and self.datastore is None:
            raise UsageError("draft='datastore' needs datastore=FILE, made by `outpace index`")
        for name, goes_with in (
            ("head", ("auto", *HEADS)),
            ("draft_model", ("auto", "draft_model")),
            ("datastore", ("auto", "datastore")),
            ("draft_layers", ("self",)),
        ):
            if getattr(self, name) not in (None, NO_HEAD) and draft not in goes_with:
                raise UsageError(f"{name}= and draft={draft!r} exclude each other: it goes with {', '.join(goes_with)}")
        if self.draft_tokens is not None:
            if type(self.draft_tokens) is not int or not 0 <= self.draft_tokens <= MAX_DRAFT:
                raise UsageError(f"draft_tokens must be in 0 .. {MAX_DRAFT}, got {self.draft_tokens!r}")
            if draft == "none" and self.draft_tokens:
                raise UsageError(f"draft_tokens={self.draft_tokens} needs a drafter: draft='none' excludes it")
        check_precision(self.precision)
        cache_kind(self.kv_cache, self.precision)
        if self.backend not in ("native", "reference"):
            raise UsageError(f"backend must be native or reference, got {self.backend!r}")
        if self.backend == "reference" and self.threads is not None:
            raise UsageError("threads= and backend='reference' exclude each other: the reference runs on one")
        if not isinstance(self.cache, bool):
            raise UsageError(f"cache must be True or False, got {self.cache!r}")
        if self.context is not None and not isinstance(self.context, int):
            raise UsageError(f"context must be a whole number, got {self.context!r}")


@dataclass(frozen=True, slots=True)
class Parts:
    """drafters: the main one first. shape: what passes of some row counts cost (costs.py), None where nobody asks."""

    target: Backend
    tokenizer: Tokenizer
    drafters: list[Drafter]
    shape: dict[int, float] | None
    template: ChatTemplate | None
    defaults: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Small:
    """A model that drafts, its arithmetic, and what its re-laid weights are kept under."""

    name: str
    loaded: LoadedModel
    precision: Precision
    variant: str = ""


def open_model(o: Options) -> Parts:
    """Reads, checks and opens everything. Raises UsageError, HubError, ModelError, CapacityError."""
    if o.draft_tokens == 0:  # nothing is looked up or opened to draft nothing
        o = replace(o, draft="none", head=None, draft_model=None, datastore=None, draft_layers=None)
    loaded = _files(o, o.model)
    tokenizer = load_tokenizer(loaded)
    corpus = _datastore(o, tokenizer)
    head = _head(o, loaded, tokenizer)
    small = _small(o, loaded, tokenizer, head)
    target = _target(o, loaded, head, small)
    drafters: list[Drafter] = []
    if head is not None:
        try:
            drafters.append(open_head(head, loaded, target, o.cache))
        except ModelError as error:
            _without_head(o, loaded, error)
    if small is not None:
        positions = min(target.capacity.positions, small.loaded.config.max_position_embeddings)
        model = _backend(o, small.loaded, positions, small.precision, small.variant)
        drafters.append(ways.DraftModelDrafter(model, small.name))
    if o.draft in ("auto", "self", "suffix"):  # the suffix automaton finds what n-grams find
        drafters.append(ways.SuffixDrafter())
    elif o.draft == "ngram":
        drafters.append(ways.NgramDrafter())
    if corpus is not None:
        drafters.append(corpus)
    shape = _shape(o, loaded, target) if drafters and o.draft_tokens is None else None
    return Parts(target, tokenizer, drafters, shape, load_template(loaded, tokenizer), load_defaults(loaded))


def _files(o: Options, name: str | Path) -> LoadedModel:
    loaded = load_model(hub.resolve(name, offline=o.offline, progress=o.progress))
    for notice in loaded.notices:
        warnings.warn(notice, stacklevel=4)
    return loaded


def _backend(
    o: Options, loaded: LoadedModel, positions: int | None, precision: Precision, variant: str = ""
) -> Backend:
    config, weights = loaded.config, loaded.weights
    same: dict[str, Any] = {"precision": precision, "slots": o.slots, "positions": positions, "kv_cache": o.kv_cache}
    if o.backend == "reference":
        return ReferenceBackend(config, weights, **same)
    relaid = Relaid(hub.relaid(loaded.path), loaded.path, variant=variant) if o.cache else None
    return NativeBackend(config, weights, threads=o.threads, relaid=relaid, **same)


def _small(o: Options, loaded: LoadedModel, tokenizer: Tokenizer, head: LoadedHead | None) -> _Small | None:
    """The model that drafts for `loaded`, if one does."""
    if o.draft_model is not None:
        small = _files(o, o.draft_model)
        difference = same_vocabulary(tokenizer, load_tokenizer(small))
        if difference is not None:
            raise UsageError(f"{o.draft_model} cannot draft for {o.model}: {difference}")
        return _Small("draft_model", small, o.precision)
    # Rounding its weights takes a while: only what is kept on the disk is worth it without being asked for.
    by_itself = o.draft == "auto" and o.backend == "native" and o.cache and head is None
    if o.draft != "self" and not (by_itself and pays(loaded, o.precision, o.kv_cache)):
        return None
    layers = kept_layers(loaded.config.num_hidden_layers, o.draft_layers)
    small = self_draft(load_model(loaded.path), tokenizer, layers)
    if not smaller(small, loaded, o.precision):
        raise UsageError(f"draft='self' drafts at 4 bits, which {o.model} has already: use another drafter")
    return _Small("self", small, "int8", f"self {RULE} {layers}")


def _datastore(o: Options, tokenizer: Tokenizer) -> Drafter | None:
    if o.datastore is None:
        return None
    from .drafters.datastore import open_for

    return ways.DatastoreDrafter(open_for(o.datastore, tokenizer, str(o.model)))


def _target(o: Options, loaded: LoadedModel, head: LoadedHead | None, small: _Small | None) -> Backend:
    """The model itself, if it fits together with what drafts for it."""
    config = loaded.config
    if o.context is not None and not 1 <= o.context <= config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise UsageError(f"context must be in 1 .. {limit} for {loaded.path}, got {o.context}")
    if o.backend == "native":
        beside = _beside(o, loaded, head, small)
        check_fits(loaded.path, config, loaded.weights, o.precision, o.context, o.kv_cache, beside)
    return _backend(o, loaded, o.context, o.precision)


def _beside(o: Options, loaded: LoadedModel, head: LoadedHead | None, small: _Small | None) -> int:
    """Bytes that drafters will take, for as many tokens as the target is asked to hold."""
    least = min(o.context or LEAST_CONTEXT, loaded.config.max_position_embeddings)
    found = 0
    if head is not None:
        found += head_memory(head, loaded, o.precision, least, o.kv_cache).total
    if small is not None:
        config, weights = small.loaded.config, small.loaded.weights
        least = min(least, config.max_position_embeddings)
        found += estimate(config, weights, small.precision, least, o.kv_cache).total
    return found


def head_memory(
    head: LoadedHead, loaded: LoadedModel, precision: str, context: int, kv_cache: CacheOption = "auto"
) -> Memory:
    """What a head will need beside its model, neither of which is touched."""
    lm_head = loaded.weights.kind(HEAD if loaded.weights.has(HEAD) else EMBEDDING)
    its = precision_of_heads(loaded.config, loaded.weights, precision)
    return estimate_head(head.config, head.weights, lm_head, its, context, kv_cache)


def _head(o: Options, loaded: LoadedModel, tokenizer: Tokenizer) -> LoadedHead | None:
    """The head that is given, inside the model or in the box."""
    if o.head == NO_HEAD or o.draft not in ("auto", *HEADS):
        return None
    if o.head is not None:
        path = Path(o.head) if Path(o.head).exists() else hub.resolve(o.head, offline=o.offline, progress=o.progress)
        head, _ = load_calibrated(path, loaded.config, loaded.path)
        check_vocabulary(path, loaded.path, tokenizer)
        kind = head.config.algorithm
        if o.draft not in ("auto", kind):
            raise UsageError(f"{path} is a head of kind {kind}, not {o.draft}: use draft={kind!r}")
        return head
    found: LoadedHead | None = None
    try:
        # One in the box is not for those who said what drafts, nor for the oracle, which is slow enough.
        if loaded.head or o.draft != "auto" or (o.draft_model is None and o.backend == "native"):
            found = own_head(loaded, o.draft)
    except ModelError as error:
        _without_head(o, loaded, error)
    if found is None and o.draft != "auto":
        raise UsageError(f"draft={o.draft!r} needs head=PATH, a head of that kind made for {o.model}, which has none")
    asked_for = o.draft != "auto" or loaded.head
    return found if found is None or asked_for or _has_room(o, found, loaded) else None


def own_head(loaded: LoadedModel, draft: str = "auto") -> LoadedHead | None:
    """The head inside the model, or the one that comes with outpace for it; draft: of this kind. Raises ModelError."""
    if loaded.head and draft in ("auto", "mtp"):
        return load_calibrated(loaded.path, loaded.config, loaded.path)[0]
    from .heads.boxed import find

    box = find(loaded.path)
    if box is None:
        return None
    head = load_calibrated(box.path, loaded.config, loaded.path)[0]
    return head if draft in ("auto", head.config.algorithm) else None


def _has_room(o: Options, head: LoadedHead, loaded: LoadedModel) -> bool:
    """Whether there is memory for a head in the box, too; else a warning."""
    available, least = available_memory(), min(o.context or LEAST_CONTEXT, loaded.config.max_position_embeddings)
    need = head_memory(head, loaded, o.precision, least, o.kv_cache).total
    whole = estimate(loaded.config, loaded.weights, o.precision, least, o.kv_cache).total
    if available is None or not whole <= available < whole + need:
        return True  # or without it there is no room either
    warnings.warn(f"the draft head in the box is not used: {size(need)} of memory are missing for it", stacklevel=5)
    return False


def _without_head(o: Options, loaded: LoadedModel, error: ModelError) -> None:
    """A head that was asked for must be right; one that happens to be there need not."""
    if o.head is not None or o.draft != "auto":
        raise error
    where = "inside the model" if loaded.head else "in the box"
    warnings.warn(f"the draft head {where} is not used: {error}", stacklevel=5)


def _shape(o: Options, loaded: LoadedModel, target: Backend) -> dict[int, float]:
    how = f"{target.isa}, {target.threads} threads" if isinstance(target, NativeBackend) else o.backend
    kept = hub.relaid(loaded.path) / "costs.json" if o.cache else None
    when = loaded.path.stat().st_mtime_ns
    return kept_shape(target, kept, f"{o.precision}, {o.kv_cache} cache, {how}, of {when}")


def open_head(
    head: LoadedHead, loaded: LoadedModel, target: Backend, cache: bool = False
) -> HeadDrafter | BlockDrafter:
    """The drafter with a learned head, which runs beside its target and takes its tensors. cache: use and keep its
    weights as they are laid out. Raises ModelError for weights that cannot be held."""
    from .backends.running_head import run_head
    from .heads.loading import borrowed

    own = {name: head.weights.take_tensor(name) for name in head.weights.keys()}  # noqa: SIM118

    def borrow() -> Mapping[str, Tensor]:  # the target took its own
        return borrowed(head.config, load_model(loaded.path).weights, loaded.config)

    relaid = Relaid(hub.relaid(head.path), head.path, beside=loaded.path, least=_LEAST_HEAD) if cache else None
    running = run_head(target, head.config, own, borrow, head.d2t, relaid)
    return ways.BlockDrafter(running) if head.config.algorithm == "dflash" else ways.HeadDrafter(running)


def check_vocabulary(head: Path, model: Path, tokenizer: Tokenizer | None = None) -> None:
    """Raises ModelError where a head brings a tokenizer (beside its files, or in its GGUF file) of other tokens than
    the model's, or a damaged one. tokenizer: the model's, if it is at hand. Without one there is nothing to compare."""
    its, ours = _vocabulary_file(head), _vocabulary_file(model)
    if its is None or ours is None or its == ours:
        return
    if its.name == ours.name == "tokenizer.json" and its.read_bytes() == ours.read_bytes():
        return
    other = _tokenizer_in(its)
    tokenizer = _tokenizer_in(ours) if other is not None and tokenizer is None else tokenizer
    if other is None or tokenizer is None:
        return
    if difference := same_vocabulary(tokenizer, other):
        raise ModelError(f"{head}: the head is for another target: {difference}")


def _vocabulary_file(path: Path) -> Path | None:
    """The file that holds the tokenizer of a model or head, if there is one."""
    if path.is_dir() and not (path / "config.json").is_file() and len(files := sorted(path.glob("*.gguf"))) == 1:
        path = files[0]
    if path.suffix.lower() == ".gguf":
        return path
    file = (path if path.is_dir() else path.parent) / "tokenizer.json"
    return file if file.is_file() else None


def _tokenizer_in(file: Path) -> Tokenizer | None:
    if file.suffix.lower() != ".gguf":
        return Tokenizer.from_folder(file.parent)
    metadata = GGUFFile.open(file).metadata
    try:
        return Tokenizer.from_gguf(metadata) if "tokenizer.ggml.tokens" in metadata else None
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None


def load_calibrated(path: Path, target: ModelConfig, model: Path) -> tuple[LoadedHead, dict[str, Any]]:
    """The head at `path`, read as it was calibrated for the model, if it was, and the conventions found so.

    What is kept and cannot be right (another version may have kept it) is left out with a warning. Raises as load_head.
    """
    from .heads.loading import load_head

    if kept := kept_conventions(path, model):
        try:
            return load_head(path, target, conventions=kept), kept
        except (ModelError, UsageError) as error:
            head = load_head(path, target)  # or the files are at fault
            again = "the head is read as its file says; outpace inspect --calibrate finds them anew"
            warnings.warn(f"kept conventions are not used: {error}: {again}", stacklevel=5)
            return head, {}
    return load_head(path, target), {}


def kept_conventions(head: Path, model: Path) -> dict[str, Any]:
    """How `outpace inspect --calibrate` found this head to be read best with this model; {} where it did not, or the
    files are others now."""
    try:
        kept = read_json(conventions_file(head), missing={})
    except ModelError:
        return {}
    found = kept.get("conventions")
    return found if isinstance(found, dict) and kept.get("key") == conventions_key(head, model) else {}


def conventions_file(head: Path) -> Path:
    """Where they are kept."""
    return hub.relaid(head) / "conventions.json"


def conventions_key(head: Path, model: Path) -> str:
    """What the files are known by: names, sizes and times."""
    files = [file for path in (head, model) for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    return " ".join(f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files if f.is_file())


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

"""What backends/base.py promises, asked of every backend in tiny.BACKENDS. Equality means equality of bits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

import tiny
from outpace.backends.base import Backend, Rows
from outpace.types import CapacityError, ModelError, OutpaceError, RewindError, UsageError

TOKENS = [3, 17, 66, 5, 5, 41, 0, 22, 9, 33, 58, 12, 7]
FORMS = ("qwen3", "sliding", "moe", "moe_shared", "qwen2", "llama", "tied", "bias", "mlp_bias")


@pytest.fixture(params=tiny.BACKENDS)
def make(request: pytest.FixtureRequest) -> tiny.Make:
    return tiny.BACKENDS[request.param]


@pytest.fixture
def backend(make: tiny.Make) -> Backend:
    return make(*tiny.random_model("qwen3"), slots=4, positions=32)


def same(a: np.ndarray, b: np.ndarray) -> None:
    assert a.dtype == np.float32
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def feed(backend: Backend, slot: int, tokens: Sequence[int], chunk: int | None = None) -> np.ndarray:
    """Appends and commits tokens in chunks; logits of all rows."""
    chunk = chunk or len(tokens)
    rows = []
    for at in range(0, len(tokens), chunk):
        part = tokens[at : at + chunk]
        rows.append(backend.forward([Rows(slot, part)]).logits)
        backend.commit(slot, range(len(part)))
    return np.concatenate(rows)


def fresh(backend: Backend, tokens: Sequence[int]) -> np.ndarray:
    """Logits of these tokens in a slot of their own, which is closed again."""
    slot = backend.new_slot()
    try:
        return feed(backend, slot, tokens)
    finally:
        backend.free_slot(slot)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e7])
def test_a_weight_that_has_no_8_bit_form_is_named(bad: float) -> None:
    config, arrays = tiny.random_model("qwen3")
    arrays["model.layers.1.mlp.up_proj.weight"][3, 4] = bad
    for name, make in tiny.BACKENDS.items():
        if name.endswith("int8"):
            with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight: cannot quantise"):
                make(config, arrays)


# ------------------------------------------------------------------------------------------------ rows and company


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_chunked_prefill_equals_whole(make: tiny.Make, form: str, chunk: int) -> None:
    backend = make(*tiny.random_model(form))
    whole = fresh(backend, TOKENS)
    assert whole.shape == (len(TOKENS), backend.config.vocab_size)
    assert np.isfinite(whole).all()
    assert len(set(whole.argmax(axis=1))) > 3  # rows differ, so that equality says something
    same(whole, feed(backend, backend.new_slot(), TOKENS, chunk))


@pytest.mark.parametrize("form", FORMS)
def test_tree_rows_equal_the_chains_they_spell(make: tiny.Make, form: str) -> None:
    backend = make(*tiny.random_model(form))
    prefix, tree, parents = TOKENS[:8], [4, 9, 4, 30, 30, 61], [-1, -1, 0, 0, 1, 3]
    slot = backend.new_slot()
    feed(backend, slot, prefix)
    rows = backend.forward([Rows(slot, tree, parents)], taps=[1]).logits
    for row in range(len(tree)):
        path, at = [], row
        while at >= 0:
            path.insert(0, tree[at])
            at = parents[at]
        same(rows[row], fresh(backend, prefix + path)[-1])


def test_tree_commit_keeps_a_path(backend: Backend) -> None:
    slot = backend.new_slot()
    feed(backend, slot, TOKENS[:4])
    backend.forward([Rows(slot, [4, 9, 8, 30, 50], [-1, -1, 0, 1, 3])])
    backend.commit(slot, [1, 3, 4])
    assert backend.length(slot) == 7
    same(feed(backend, slot, [11, 12]), fresh(backend, [*TOKENS[:4], 9, 30, 50, 11, 12])[-2:])


def test_explicit_chain_is_the_default(backend: Backend) -> None:
    a, b = backend.new_slot(), backend.new_slot()
    same(
        backend.forward([Rows(a, TOKENS)]).logits,
        backend.forward([Rows(b, TOKENS, range(-1, len(TOKENS) - 1))]).logits,
    )


@pytest.mark.parametrize("form", FORMS)
def test_several_slots_in_a_pass_equal_alone(make: tiny.Make, form: str) -> None:
    backend = make(*tiny.random_model(form))
    contexts, parts = [TOKENS[:2], TOKENS[:9], []], [[7], [1, 2, 3], TOKENS[4:9]]
    slots = [backend.new_slot() for _ in contexts]
    for slot, context in zip(slots, contexts, strict=True):
        if context:
            feed(backend, slot, context)
    out = backend.forward([Rows(slot, part) for slot, part in zip(slots, parts, strict=True)], taps=[0])
    alone = [fresh(backend, context + part)[len(context) :] for context, part in zip(contexts, parts, strict=True)]
    same(out.logits, np.concatenate(alone))
    assert out.taps[0].shape == (9, backend.config.hidden_size)


def test_a_subset_of_logits_has_the_same_bits(backend: Backend) -> None:
    a, b = backend.new_slot(), backend.new_slot()
    whole = backend.forward([Rows(a, TOKENS), Rows(b, TOKENS[3:8])]).logits
    some = backend.forward([Rows(a, TOKENS, logits=[0, 5, 12]), Rows(b, TOKENS[3:8], logits=[4])]).logits
    same(some, whole[[0, 5, 12, len(TOKENS) + 4]])
    none = backend.forward([Rows(a, TOKENS, logits=[])], taps=[2])
    assert none.logits.shape == (0, backend.config.vocab_size)
    assert none.taps[2].shape == (len(TOKENS), backend.config.hidden_size)


def test_taps(backend: Backend) -> None:
    """-1 is the embedding, num_hidden_layers the final norm; asking changes nothing; company changes nothing."""
    config, arrays = tiny.random_model("qwen3")
    a, b = backend.new_slot(), backend.new_slot()
    every = [*range(-1, config.num_hidden_layers + 1)]
    out = backend.forward([Rows(a, TOKENS[:5]), Rows(b, TOKENS)], taps=every)
    same(out.logits, backend.forward([Rows(a, TOKENS[:5]), Rows(b, TOKENS)]).logits)
    assert list(out.taps) == every
    for tap in every:
        assert out.taps[tap].shape == (5 + len(TOKENS), config.hidden_size)
        same(out.taps[tap][5:], backend.forward([Rows(b, TOKENS)], taps=[tap]).taps[tap])
    np.testing.assert_allclose(out.taps[-1][:5], arrays["model.embed_tokens.weight"][TOKENS[:5]], atol=0.03)
    last, final = out.taps[config.num_hidden_layers - 1], out.taps[config.num_hidden_layers]
    normed = last / np.sqrt((last**2).mean(axis=1, keepdims=True) + 1e-6) * arrays["model.norm.weight"]
    np.testing.assert_allclose(final, normed, atol=1e-4)
    for lower, upper in pairwise(every):
        assert np.abs(out.taps[lower] - out.taps[upper]).max() > 0.1


@pytest.mark.parametrize("name", tiny.BACKENDS)
def test_same_numbers_as_the_oracle(name: str) -> None:
    """Of the same precision, named by the end of the backend's name. Rounding of activations turns a last-bit
    difference into a step of 1/127 now and then: int8 is compared on average."""
    precision = name.rsplit("-", 1)[-1]
    for form in tiny.VARIANTS:
        model = tiny.random_model(form)
        oracle = fresh(tiny.BACKENDS[f"reference-{precision}"](*model), TOKENS)
        difference = np.abs(fresh(tiny.BACKENDS[name](*model), TOKENS) - oracle)
        assert (difference.max() < 1e-3) if precision == "f32" else (difference.mean() < 0.03 * oracle.std()), form


# -------------------------------------------------------------------------------------------------- the transaction


def test_pending_rows_are_dropped(backend: Backend) -> None:
    slot = backend.new_slot()
    feed(backend, slot, TOKENS[:5])
    backend.forward([Rows(slot, [60, 61, 62, 63])])  # never committed
    assert backend.length(slot) == 5
    same(feed(backend, slot, TOKENS[5:]), fresh(backend, TOKENS)[5:])


def test_commit_keeps_a_prefix_and_forgets_the_rest(backend: Backend) -> None:
    slot = backend.new_slot()
    feed(backend, slot, TOKENS[:5])
    backend.forward([Rows(slot, [TOKENS[5], TOKENS[6], 60, 61])])
    backend.commit(slot, [0, 1])
    assert backend.length(slot) == 7
    same(feed(backend, slot, TOKENS[7:]), fresh(backend, TOKENS)[7:])


def test_commit_of_nothing(backend: Backend) -> None:
    slot = backend.new_slot()
    feed(backend, slot, TOKENS[:5])
    backend.forward([Rows(slot, [60, 61])])
    backend.commit(slot, [])
    assert backend.length(slot) == 5
    with pytest.raises(UsageError):
        backend.commit(slot, [0])  # it is gone
    same(feed(backend, slot, TOKENS[5:]), fresh(backend, TOKENS)[5:])


def test_a_pass_over_other_slots_keeps_pending_rows(backend: Backend) -> None:
    a, b = backend.new_slot(), backend.new_slot()
    backend.forward([Rows(a, TOKENS[:6])])
    feed(backend, b, [60, 61, 62])
    backend.commit(a, range(6))
    same(feed(backend, a, TOKENS[6:]), fresh(backend, TOKENS)[6:])


def test_fork_is_independent(backend: Backend) -> None:
    a = backend.new_slot()
    feed(backend, a, TOKENS[:6])
    backend.forward([Rows(a, [60, 61])])  # pending rows are not forked
    b = backend.fork_slot(a)
    assert backend.length(b) == 6
    other = feed(backend, b, [50, 51, 52])
    ours = feed(backend, a, TOKENS[6:])
    same(ours, fresh(backend, TOKENS)[6:])
    same(other, fresh(backend, [*TOKENS[:6], 50, 51, 52])[6:])
    backend.free_slot(a)
    same(feed(backend, b, [7]), fresh(backend, [*TOKENS[:6], 50, 51, 52, 7])[-1:])


def test_truncate(backend: Backend) -> None:
    slot = backend.new_slot()
    feed(backend, slot, [*TOKENS[:6], 60, 61, 62])
    backend.truncate(slot, 6)
    assert backend.length(slot) == 6
    same(feed(backend, slot, TOKENS[6:]), fresh(backend, TOKENS)[6:])
    backend.truncate(slot, 0)
    same(feed(backend, slot, TOKENS), fresh(backend, TOKENS))
    backend.forward([Rows(slot, [1])])
    backend.truncate(slot, backend.length(slot))  # drops what is pending
    with pytest.raises(UsageError):
        backend.commit(slot, [0])
    for length in (-1, len(TOKENS) + 1):
        with pytest.raises(RewindError):
            backend.truncate(slot, length)
    assert backend.length(slot) == len(TOKENS)


def test_a_freed_slot_comes_back_empty(backend: Backend) -> None:
    slot = backend.new_slot()
    feed(backend, slot, [60, 61, 62])
    backend.free_slot(slot)
    again = backend.new_slot()
    assert backend.length(again) == 0
    same(feed(backend, again, TOKENS), fresh(backend, TOKENS))


def test_sliding_window_forgets(make: tiny.Make) -> None:
    """With every layer sliding over w tokens, L layers see (w - 1) * L tokens back and not one more."""
    config, arrays = tiny.random_model("sliding", sliding_window=3, max_window_layers=0)
    backend = make(config, arrays)
    reach = (3 - 1) * config.num_hidden_layers
    out = fresh(backend, TOKENS)
    first_changed = fresh(backend, [TOKENS[0] + 1, *TOKENS[1:]])
    same(out[reach + 1 :], first_changed[reach + 1 :])
    assert (out[reach] != first_changed[reach]).any()
    full, _ = tiny.random_model("sliding", use_sliding_window=False)
    assert np.abs(fresh(make(full, arrays), TOKENS)[-1] - out[-1]).max() > 0.1


def test_fill_to_the_last_position(backend: Backend) -> None:
    slot = backend.new_slot()
    tokens = [(5 * i * i + i) % 67 for i in range(backend.capacity.positions)]
    chunks = feed(backend, slot, tokens, 7)
    assert backend.length(slot) == backend.capacity.positions
    same(chunks, fresh(backend, tokens))
    with pytest.raises(CapacityError):
        backend.forward([Rows(slot, [1])])


# ------------------------------------------------------------------------------------------------------------ errors

BAD_PASSES: dict[str, tuple[type[OutpaceError], list[Rows], list[int]]] = {
    "closed slot": (UsageError, [Rows(0, [1]), Rows(3, [1])], []),
    "slot that never was": (UsageError, [Rows(0, [1]), Rows(-1, [1])], []),
    "slot twice": (UsageError, [Rows(0, [1]), Rows(0, [1])], []),
    "no slots": (UsageError, [], []),
    "no rows": (UsageError, [Rows(0, [1]), Rows(1, [])], []),
    "token too large": (UsageError, [Rows(0, [1]), Rows(1, [1, 67])], []),
    "no token": (UsageError, [Rows(0, [1]), Rows(1, [1.5])], []),  # type: ignore[list-item]
    "negative token": (UsageError, [Rows(0, [1]), Rows(1, [-1])], []),
    "parent is later": (UsageError, [Rows(0, [1]), Rows(1, [1, 2], [1, -1])], []),
    "parent is itself": (UsageError, [Rows(0, [1]), Rows(1, [1, 2], [-1, 1])], []),
    "parent below -1": (UsageError, [Rows(0, [1]), Rows(1, [1, 2], [-2, 0])], []),
    "too few parents": (UsageError, [Rows(0, [1]), Rows(1, [1, 2], [-1])], []),
    "logits of no row": (UsageError, [Rows(0, [1]), Rows(1, [1, 2], logits=[2])], []),
    "logits not ascending": (UsageError, [Rows(0, [1]), Rows(1, [1, 2], logits=[1, 0])], []),
    "tap too high": (UsageError, [Rows(0, [1])], [4]),
    "tap too low": (UsageError, [Rows(0, [1])], [-2]),
    "over the positions": (CapacityError, [Rows(0, [1]), Rows(1, [1] * 33)], []),
}


@pytest.mark.parametrize("case", BAD_PASSES)
def test_a_bad_pass_changes_nothing(backend: Backend, case: str) -> None:
    error, batch, taps = BAD_PASSES[case]
    slots = [backend.new_slot(), backend.new_slot()]
    assert slots == [0, 1]
    for slot in slots:
        feed(backend, slot, TOKENS[:4])
        backend.forward([Rows(slot, TOKENS[4:6])])
    with pytest.raises(error) as caught:
        backend.forward(batch, taps)
    assert "\n" not in str(caught.value)
    for slot in slots:
        assert backend.length(slot) == 4
        backend.commit(slot, [0, 1])  # the pending rows are still there
        same(feed(backend, slot, TOKENS[6:]), fresh(backend, TOKENS)[6:])


@pytest.mark.parametrize("rows", [[1], [0, 2], [1, 0], [0, 0], [-1], [0, 1, 2, 3], [2, 1]])
def test_commit_refuses_what_is_no_path(backend: Backend, rows: list[int]) -> None:
    slot = backend.new_slot()
    backend.forward([Rows(slot, TOKENS[:3])])
    with pytest.raises(UsageError):
        backend.commit(slot, rows)
    assert backend.length(slot) == 0
    backend.commit(slot, [0, 1, 2])
    same(feed(backend, slot, TOKENS[3:]), fresh(backend, TOKENS)[3:])


def test_closed_slots_are_refused(backend: Backend) -> None:
    slot = backend.new_slot()
    backend.free_slot(slot)
    for call in (
        lambda: backend.free_slot(slot),
        lambda: backend.fork_slot(slot),
        lambda: backend.length(slot),
        lambda: backend.commit(slot, []),
        lambda: backend.truncate(slot, 0),
    ):
        with pytest.raises(UsageError):
            call()


def test_slots_run_out(backend: Backend) -> None:
    slots = [backend.new_slot() for _ in range(backend.capacity.slots)]
    assert len(set(slots)) == len(slots)
    feed(backend, slots[0], TOKENS)
    with pytest.raises(CapacityError):
        backend.new_slot()
    with pytest.raises(CapacityError):
        backend.fork_slot(slots[0])
    backend.free_slot(slots[1])
    again = backend.fork_slot(slots[0])
    assert backend.length(again) == len(TOKENS)


# ------------------------------------------------------------------------------- would these tests see a broken model?


def greedy(backend: Backend, tokens: Sequence[int], count: int) -> list[int]:
    slot = backend.new_slot()
    row = feed(backend, slot, tokens)[-1]
    out = []
    for _ in range(count):
        out.append(int(row.argmax()))
        row = feed(backend, slot, out[-1:])[-1]
    return out


def test_greedy_output_varies(make: tiny.Make) -> None:
    for seed in range(3):
        assert len(set(greedy(make(*tiny.random_model("qwen3", seed)), TOKENS[:4], 12))) > 4


SWAPS = {
    "gate and up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "k and v": ("self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "q norm and k norm": ("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    "the two layer norms": ("input_layernorm.weight", "post_attention_layernorm.weight"),
}


@pytest.mark.parametrize("swap", SWAPS)
def test_swapped_tensors_show(make: tiny.Make, swap: str) -> None:
    config, arrays = tiny.random_model("qwen3")
    right = greedy(make(config, arrays), TOKENS[:4], 12)
    first, second = (f"model.layers.1.{name}" for name in SWAPS[swap])
    wrong = arrays | {first: arrays[second], second: arrays[first]}
    assert greedy(make(config, wrong), TOKENS[:4], 12) != right


def test_swapped_layers_show(make: tiny.Make) -> None:
    config, arrays = tiny.random_model("qwen3")
    right = greedy(make(config, arrays), TOKENS[:4], 12)

    def swapped(name: str) -> str:
        return (
            name.replace("layers.0.", "layers.x.").replace("layers.1.", "layers.0.").replace("layers.x.", "layers.1.")
        )

    assert greedy(make(config, {name: arrays[swapped(name)] for name in arrays}), TOKENS[:4], 12) != right


def test_a_stale_cache_shows(backend: Backend) -> None:
    """Committing rejected rows, or dropping accepted ones, changes what follows."""
    right = fresh(backend, TOKENS)[-1]
    slot = backend.new_slot()
    feed(backend, slot, TOKENS[:5])
    backend.forward([Rows(slot, [60, 61])])
    backend.commit(slot, [0, 1])  # not rolled back
    stale = feed(backend, slot, TOKENS[5:])[-1]
    assert np.abs(stale - right).max() > 0.1
    backend.truncate(slot, 0)
    short = feed(backend, slot, [*TOKENS[:4], *TOKENS[5:]])[-1]
    assert np.abs(short - right).max() > 0.1


def test_an_off_by_one_position_shows(backend: Backend) -> None:
    """Rotary positions are relative, so that a shift of all tokens hardly shows; a shift of one of them must."""
    slot = backend.new_slot()
    feed(backend, slot, TOKENS[:5])
    rows = backend.forward([Rows(slot, [9, 9], [-1, -1])]).logits
    same(rows[0], rows[1])  # siblings share a position
    chain = backend.forward([Rows(slot, [9, 9])]).logits
    same(chain[0], rows[0])
    assert np.abs(chain[1] - chain[0]).max() > 0.1

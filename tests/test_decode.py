"""The loop: the same tokens whatever drafts, rounds and company do; where an answer ends; what is counted."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FunctionDrafter, Machine, TableBackend, oracle_drafter, random_drafter, table_logits, wrong_drafter
from outpace import decode
from outpace.backends.base import Rows
from outpace.controller import Controller
from outpace.decode import Decoder, Request
from outpace.drafters import Drafter, DraftModelDrafter, NgramDrafter, State, SuffixDrafter
from outpace.engine import Engine
from outpace.text.detokenizer import Detokenizer
from outpace.text.stream import TextStream
from outpace.types import CapacityError, ContextError, Draft, NumericalError, SampleOpts, UsageError
from tiny import BACKENDS, random_model

V = 5
PROMPTS = [(1, 2, 3), (4,), (0, 1, 0, 1, 0), (2, 2, 2, 2, 2, 2, 2)]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.7},
    "hot": {"temperature": 1.5},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "bias": {"temperature": 0.8, "logit_bias": {0: 1.0, 3: -2.0}},
    "bad_words": {"temperature": 0.8, "bad_words": ((0, 1), (2, 3, 4))},
}


def engine(drafter: Drafter | None = None, fixed: int | None = None, **backend: Any) -> Engine:
    return Engine(Decoder(TableBackend(V, **backend), () if drafter is None else (drafter,), Controller(fixed)))


def answer(e: Engine, prompt: Sequence[int], n: int = 24, *, speculate: bool = True, **opts: Any) -> Request:
    opts = {"seed": 11, **opts}
    request = e.submit(prompt, SampleOpts(max_tokens=n, **opts), speculate=speculate)
    e.run([request])
    return request


def plain(prompt: Sequence[int], n: int = 24, **opts: Any) -> list[int]:
    return answer(engine(positions=1024), prompt, n, **opts).output


def drafters(opts: dict[str, Any]) -> dict[str, Drafter]:
    answers = {prompt: plain(prompt, 40, **opts) for prompt in PROMPTS}
    return {
        "perfect": oracle_drafter(answers),
        "wrong": wrong_drafter(answers, V),
        "random": random_drafter(V),
        "ngram": NgramDrafter(shortest=1),
        "suffix": SuffixDrafter(shortest=1),
        "draft_model": DraftModelDrafter(TableBackend(V)),
        "other_model": DraftModelDrafter(TableBackend(V, salt=3)),
    }


# ------------------------------------------------------------------------------------------------------ losslessness


@pytest.mark.parametrize("name", SETTINGS)
def test_speculation_never_changes_a_token(name: str) -> None:
    opts = SETTINGS[name]
    for k in (1, 2, 3, 5, 8, None):
        for kind, drafter in drafters(opts).items():
            e = engine(drafter, k)
            for prompt in PROMPTS:
                request = answer(e, prompt, **opts)
                assert request.output == plain(prompt, **opts), (kind, k, prompt)
                if k is None:
                    continue  # the controller may find that no draft pays
                accepted, drafted = request.stats.accepted, request.stats.drafted
                if kind == "wrong":
                    assert accepted == 0
                    assert drafted > 0
                if kind in ("perfect", "draft_model"):
                    assert accepted == drafted > 0
                    assert request.stats.rounds < 24


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_draft_at_any_round_gives_the_same_tokens(data: st.DataObject) -> None:
    prompt = tuple(data.draw(st.lists(st.integers(0, V - 1), min_size=1, max_size=6)))
    opts = SETTINGS[data.draw(st.sampled_from(sorted(SETTINGS)))]

    def draft(state: State, n: int) -> Draft:
        tokens = data.draw(st.lists(st.integers(0, V - 1), max_size=n))
        tree = data.draw(st.booleans())
        parents = tuple(data.draw(st.integers(-1, i - 1)) for i in range(len(tokens))) if tree else None
        return Draft(tuple(tokens), parents=parents)

    request = answer(engine(FunctionDrafter(draft), 8), prompt, 12, **opts)
    assert request.output == plain(prompt, 12, **opts)


def test_tree_drafts_give_the_same_tokens() -> None:
    random = np.random.default_rng(4)

    def draft(state: State, n: int) -> Draft:
        parents = tuple(int(random.integers(-1, i)) for i in range(n))
        return Draft(tuple(random.integers(0, V, n).tolist()), parents=parents)

    e = engine(FunctionDrafter(draft), 12)
    paths = []
    for name, prompt in itertools.product(SETTINGS, PROMPTS):
        request = answer(e, prompt, 40, **SETTINGS[name])
        assert request.output == plain(prompt, 40, **SETTINGS[name])
        paths += [each.accepted for each in request.rounds]
    assert max(paths) > 2


def test_counts_of_trees_and_of_all_requests_together() -> None:
    random = np.random.default_rng(4)

    def draft(state: State, n: int) -> Draft:
        parents = tuple(int(random.integers(-1, i)) for i in range(n))
        return Draft(tuple(random.integers(0, V, n).tolist()), parents=parents)

    e = engine(FunctionDrafter(draft), 8)
    requests = [e.submit((1, 2, i), SampleOpts.greedy(max_tokens=30)) for i in (3, 4)]
    e.run(requests)
    total = e.decoder.total
    for request in requests:
        stats, rounds = request.stats, request.rounds
        assert (stats.rounds, stats.drafted) == (len(rounds), sum(each.drafted for each in rounds))
        assert stats.rounds_by_accepted == [
            sum(each.accepted == k for each in rounds) for k in range(max(each.accepted for each in rounds) + 1)
        ]
        assert any(each.accepted <= each.depth < each.drafted for each in rounds)
        assert stats.drafted_at == [sum(each.depth > i for each in rounds) for i in range(len(stats.drafted_at))]
    alone = [request.stats.decode_s for request in requests]
    assert max(alone) - 1e-9 < total.decode_s < sum(alone)  # the passes are shared
    assert (total.tokens, total.prompt_tokens) == (60, 6)
    assert total.accepted == sum(request.stats.accepted for request in requests) > 0
    assert total.by_source == {"function": [total.drafted, total.accepted]}


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rules_that_promise_the_distribution_repeat_with_their_seed(rule: str) -> None:
    opts = {"temperature": 1.0, "rule": rule}
    runs = [answer(engine(DraftModelDrafter(TableBackend(V, salt=3))), (1, 2, 3), **opts) for _ in range(2)]
    assert runs[0].output == runs[1].output
    assert runs[0].stats.accepted > 0
    other = answer(engine(DraftModelDrafter(TableBackend(V, salt=3))), (1, 2, 3), **opts, seed=12)  # type: ignore[misc]
    assert other.output != runs[0].output


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_all_rules_agree_when_greedy(rule: str) -> None:
    for drafter in drafters({"temperature": 0.0}).values():
        found = answer(engine(drafter, 4), (1, 2, 3), temperature=0.0, rule=rule).output
        assert found == plain((1, 2, 3), temperature=0.0)


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_first_two_tokens_follow_the_targets_law_on_the_whole_path(rule: str) -> None:
    from scipy import stats

    def law(prefix: tuple[int, ...]) -> np.ndarray:
        p = np.exp(table_logits(prefix, V).astype(np.float64))
        return p / p.sum()

    e = engine(DraftModelDrafter(TableBackend(V, salt=3)), 3)
    counts = np.zeros((V, V))
    for seed in range(3000):
        a, b = answer(e, (1, 2), 2, temperature=1.0, seed=seed, rule=rule).output
        counts[a, b] += 1
    expected = 3000 * np.array([law((1, 2))[a] * law((1, 2, a)) for a in range(V)])
    assert stats.chisquare(counts.ravel(), expected.ravel()).pvalue > 1e-4


@pytest.mark.parametrize("rows", [8, 11, 64])
def test_company_changes_nothing(rows: int) -> None:
    """Many requests with different options, slots and rows scarce, prompts longer than a pass."""
    prompts = [*PROMPTS, tuple(i % V for i in range(30)), tuple((i * i) % V for i in range(17))] * 2
    names = itertools.cycle(SETTINGS.values())
    work = [(prompt, opts, 6 + 3 * i) for i, (prompt, opts) in enumerate(zip(prompts, names, strict=False))]
    e = engine(DraftModelDrafter(TableBackend(V, salt=3)), rows=rows, slots=4)
    requests = [
        e.submit(prompt, SampleOpts(max_tokens=min(n, 30), seed=i, **opts)) for i, (prompt, opts, n) in enumerate(work)
    ]
    e.run(requests)
    for i, (request, (prompt, opts, n)) in enumerate(zip(requests, work, strict=True)):
        assert request.output == plain(prompt, min(n, 30), seed=i, **opts)
    assert max(e.decoder.target.rows) <= rows  # type: ignore[attr-defined]


def test_a_round_reads_the_target_once_and_the_draft_once_a_token() -> None:
    draft = TableBackend(V)
    e = engine(DraftModelDrafter(draft), 4)
    answer(e, (1, 2, 3), 20, temperature=0.0)
    target = e.decoder.target
    assert target.rows == [3 + 4, 5, 5, 5]  # type: ignore[attr-defined]
    # The prompt, then at most two tokens the draft has not read (its own last one and the bonus), then one a pass.
    assert draft.rows == [3, 1, 1, 1] + [2, 1, 1, 1] * 3


# ------------------------------------------------------------------------------------------------------- where it ends


def test_an_end_token_inside_an_accepted_run_stops_exactly_there() -> None:
    full = plain((1, 2, 3), 30, temperature=0.0)
    for end in set(full):
        want = full[: full.index(end) + 1]
        e = engine(oracle_drafter({(1, 2, 3): full}), 8)
        e.end_tokens = frozenset({end})
        request = answer(e, (1, 2, 3), 30, temperature=0.0)
        assert request.output == want
        assert request.finish == "stop"
        assert e.decoder.target.length(request.slot) == 3 + len(want) - 1
        stats = request.stats
        before = sum(each.tokens for each in request.rounds[:-1])
        assert stats.tokens == len(want)
        assert len(want) - before in (request.rounds[-1].accepted, request.rounds[-1].tokens)
        again = answer(e, (1, 2, 3), 30, temperature=0.0, ignore_eos=True)
        assert again.output == full


def test_stop_tokens_and_min_tokens() -> None:
    full = plain((1, 2, 3), 30, temperature=0.0)
    stop = full[4]
    first = full.index(stop)
    e = engine(oracle_drafter({(1, 2, 3): full}), 8)
    assert answer(e, (1, 2, 3), 30, temperature=0.0, stop_tokens=(stop,)).output == full[: first + 1]
    longer = answer(e, (1, 2, 3), 30, temperature=0.0, stop_tokens=(stop,), min_tokens=12)
    assert len(longer.output) > 12
    assert stop not in longer.output[:12]
    assert longer.output == plain((1, 2, 3), 30, temperature=0.0, stop_tokens=(stop,), min_tokens=12)


@pytest.mark.parametrize("n", range(1, 12))
def test_max_tokens_is_exact(n: int) -> None:
    full = plain((1, 2, 3), 30, temperature=0.0)
    request = answer(engine(oracle_drafter({(1, 2, 3): full}), 8), (1, 2, 3), n, temperature=0.0)
    assert request.output == full[:n]
    assert request.finish == "length"


def test_the_context_is_filled_to_its_last_place_and_never_beyond() -> None:
    for k in (0, 1, 3, 8):
        e = engine(DraftModelDrafter(TableBackend(V, positions=20)), k, positions=20)
        request = e.submit((1, 2, 3), SampleOpts.greedy())
        e.run([request])
        assert request.finish == "length"
        assert len(request.tokens) == 20


def test_a_prompt_that_does_not_fit_is_refused() -> None:
    e = engine(positions=8)
    with pytest.raises(ContextError, match="8 tokens"):
        e.submit((1,) * 8, SampleOpts.greedy())
    with pytest.raises(ContextError, match="at most 5"):
        e.submit((1, 2, 3), SampleOpts.greedy(max_tokens=6))
    for prompt, what in (((), "empty"), ((5,), "id 5"), ((-1,), "id -1")):
        with pytest.raises(UsageError, match=what):
            e.submit(prompt, SampleOpts.greedy())
    with pytest.raises(UsageError, match="taps"):
        e.submit((1,), SampleOpts.greedy(), taps=(2,))
    with pytest.raises(UsageError, match="stop strings"):
        e.submit((1,), SampleOpts.greedy(stop=("x",)))


# ------------------------------------------------------------------------------------------------------- what it keeps


def test_cancelled_and_finished_requests_leave_their_slots() -> None:
    e = engine(random_drafter(V), slots=2)
    requests = [e.submit((1, 2, i), SampleOpts.greedy(max_tokens=9)) for i in range(5)]
    e.step()
    e.cancel(requests[0])
    e.cancel(requests[4])
    e.cancel(requests[0])
    e.run(requests[1:4])
    assert [r.finish for r in requests] == ["cancelled", "length", "length", "length", "cancelled"]
    assert e.decoder.drafters[0].forgotten == 4  # type: ignore[attr-defined]
    e.close()
    assert not e.decoder.target._held  # type: ignore[attr-defined]


def test_the_next_turn_reads_only_what_is_new() -> None:
    e = engine(NgramDrafter())
    first = answer(e, (1, 2, 3, 4), 6, temperature=0.0)
    turn = (*first.tokens, 0, 1)
    e.decoder.target.rows.clear()  # type: ignore[attr-defined]
    second = answer(e, turn, 6, temperature=0.0, speculate=False)  # a draft would add its rows
    assert second.stats.cached_prompt_tokens == len(first.tokens) - 1
    assert e.decoder.target.rows[0] == 3  # type: ignore[attr-defined]
    assert second.output == plain(turn, 6, temperature=0.0)


def test_a_prompt_that_leaves_an_old_one_cuts_it_off() -> None:
    e = engine(NgramDrafter())
    answer(e, (1, 2, 3, 4, 0, 2), 9, temperature=0.0)
    second = answer(e, (1, 2, 3, 1, 1), 9, temperature=0.0)
    assert second.stats.cached_prompt_tokens == 3
    assert second.output == plain((1, 2, 3, 1, 1), 9, temperature=0.0)


def test_logprobs_come_with_every_token_and_do_not_depend_on_drafts() -> None:
    opts = {"temperature": 0.8, "logprobs": 2, "repetition_penalty": 1.3}
    alone = answer(engine(), (1, 2, 3), **opts)
    drafted = answer(engine(DraftModelDrafter(TableBackend(V)), 5), (1, 2, 3), **opts)
    assert drafted.stats.accepted > 0
    assert drafted.logprobs == alone.logprobs
    assert [entry.token for entry in alone.logprobs] == alone.output
    for i, entry in enumerate(alone.logprobs):
        logits = table_logits((1, 2, 3, *alone.output[:i]), V).astype(np.float64)
        assert entry.logprob == pytest.approx(logits[entry.token] - np.log(np.exp(logits).sum()))
        assert len(entry.top) == 2


def test_processed_logprobs_see_the_history_of_their_row() -> None:
    opts = {"temperature": 0.8, "logprobs": 5, "frequency_penalty": 0.5, "processed_logprobs": True}
    alone = answer(engine(), (1, 2, 3), **opts)
    drafted = answer(engine(DraftModelDrafter(TableBackend(V)), 5), (1, 2, 3), **opts)
    assert drafted.logprobs == alone.logprobs


def test_taps_have_one_row_for_every_token_read() -> None:
    for k in (0, 4):
        e = engine(DraftModelDrafter(TableBackend(V, salt=3)), k)
        request = e.submit((1, 2, 3), SampleOpts.greedy(max_tokens=9), taps=(0, -1))
        e.run([request])
        rows = np.concatenate(request.tapped[0])
        assert rows[:, 0].tolist() == list(range(1, 12))  # the table's hidden state is the number of tokens seen


class Alternate:
    """A constraint: even and odd token ids take turns."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def mask(self, ahead: Sequence[int]) -> np.ndarray:
        return np.arange(V) % 2 == (self.count + len(ahead)) % 2

    def cut(self, draft: Sequence[int]) -> int:
        return next((i for i, t in enumerate(draft) if t % 2 != (self.count + i) % 2), len(draft))

    def advance(self, tokens: Sequence[int]) -> None:
        self.count += len(tokens)

    def fork(self) -> Alternate:
        return Alternate(self.count)


def test_a_constraint_holds_at_every_row_and_cuts_drafts_before_they_cost_one() -> None:
    want = answer(engine(), (1, 2, 3), temperature=0.9, constraint=Alternate()).output
    assert [t % 2 for t in want] == [0, 1] * 12
    e = engine(FunctionDrafter(lambda state, n: Draft((0, 1, 1, 0)[:n])), 4)
    found = answer(e, (1, 2, 3), temperature=0.9, constraint=Alternate())
    assert found.output == want
    # Where the next token must be odd, the draft (0, ...) is cut whole; elsewhere after (0, 1).
    assert {each.drafted for each in found.rounds[:8]} == {0, 2}


# ---------------------------------------------------------------------------------------------------------- what fails


def test_nan_from_the_target_is_an_error_and_the_engine_goes_on() -> None:
    def logits(prefix: Sequence[int]) -> np.ndarray:
        row = table_logits(prefix, V)
        return np.full(V, np.nan, dtype=np.float32) if prefix[0] == 4 and len(prefix) > 6 else row

    e = engine(random_drafter(V), 3, logits=logits)
    with pytest.raises(NumericalError, match="nan"):
        answer(e, (4, 1), temperature=0.0)
    assert not e.running
    assert answer(e, (1, 2, 3), temperature=0.0).output == plain((1, 2, 3), temperature=0.0)


def test_nan_from_a_draft_model_leaves_the_answer_alone() -> None:
    broken = TableBackend(V, logits=lambda prefix: np.full(V, np.nan, dtype=np.float32))
    e = engine(DraftModelDrafter(broken), 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        request = answer(e, (1, 2, 3), temperature=0.7)
    assert request.output == plain((1, 2, 3), temperature=0.7)
    assert len(caught) == 1
    assert "draft_model" in str(caught[0].message)


# --------------------------------------------------------------------------------------------------------- stop strings


LETTERS = ["ab", "c", "b", "ca", "bc"]  # token id -> text


def spelled(tokens: Sequence[int]) -> str:
    return "".join(LETTERS[token] for token in tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [0, 1, 4, 8])
def test_a_stop_string_ends_the_text_wherever_rounds_and_tokens_are_cut(k: int, temperature: float) -> None:
    """Against the plain text: the answer is cut before the first stop string that is complete."""
    opts = {"temperature": temperature, "seed": 2}
    full = plain((1, 2, 3), 40, **opts)
    text = spelled(full)
    for stop in {text[i : i + n] for n in (1, 2, 3, 5) for i in range(0, len(text) - n, 3)} | {"zz"}:
        e = engine(oracle_drafter({(1, 2, 3): full}), k)
        stream = TextStream(Detokenizer(lambda token: LETTERS[token].encode()), (stop,))
        request = e.submit((1, 2, 3), SampleOpts(max_tokens=40, stop=(stop,), **opts), text=stream)
        e.run([request])
        at = text.find(stop)
        assert stream.text == (text if at < 0 else text[:at])
        assert request.finish == ("length" if at < 0 else "stop")
        if at >= 0:
            # The last token is the one that completes the stop string.
            assert len(spelled(request.output)) >= at + len(stop) > len(spelled(request.output[:-1]))
        assert request.output == full[: len(request.output)]


def test_a_stop_string_before_min_tokens_is_text() -> None:
    full = plain((1, 2, 3), 40, temperature=0.0)
    stop = LETTERS[full[0]]
    stream = TextStream(Detokenizer(lambda token: LETTERS[token].encode()), (stop,))
    e = engine(oracle_drafter({(1, 2, 3): full}), 4)
    request = e.submit((1, 2, 3), SampleOpts.greedy(max_tokens=40, stop=(stop,), min_tokens=9), text=stream)
    e.run([request])
    late = spelled(full[9 - 1 :])
    # From the ninth token on stop strings count; what came before stays.
    assert stream.text == spelled(full[:8]) + late[: late.index(stop)]
    assert request.finish == "stop"


# --------------------------------------------------------------------------------------------------- on the native core


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_two_tokens_follow_the_law_on_the_native_core(rule: str) -> None:
    """Chi-square of a tiny model with a different draft model, native passes, native sampling, whole loop."""
    from scipy import stats

    config, arrays = random_model("qwen3", vocab_size=5)
    other = random_model("qwen3", seed=1, vocab_size=5)
    target, draft = BACKENDS["native-int8"](config, arrays), BACKENDS["native-int8"](*other)
    slot = target.new_slot()

    def law(tokens: Sequence[int]) -> np.ndarray:
        logits = target.forward([Rows(slot, tokens, logits=[len(tokens) - 1])]).logits[0].astype(np.float64)
        p = np.exp((logits - logits.max()) / 4.0)
        return p / p.sum()

    e = Engine(Decoder(target, (DraftModelDrafter(draft),), Controller(2)))
    counts = np.zeros((5, 5))
    for start in range(0, 3000, 6):
        requests = [
            e.submit((1, 2), SampleOpts(max_tokens=2, temperature=4.0, seed=seed, rule=rule))  # type: ignore[arg-type]
            for seed in range(start, start + 6)
        ]
        e.run(requests)
        for request in requests:
            counts[tuple(request.output)] += 1
    expected = 3000 * np.array([law((1, 2))[a] * law((1, 2, a)) for a in range(5)])
    assert stats.chisquare(counts.ravel(), expected.ravel()).pvalue > 1e-4


# ------------------------------------------------------------------------------------------ interruptions and company


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
@pytest.mark.parametrize("rows", [20, 64])
def test_rules_repeat_alone_and_in_company(rule: str, rows: int) -> None:
    """The draft length of the rules that promise the distribution depends on neither rows nor neighbours."""
    e = engine(DraftModelDrafter(TableBackend(V, salt=3)), rows=rows, slots=4)
    prompts = [(1, 2, 3), tuple(i % V for i in range(40)), (2, 2), tuple((i * i) % V for i in range(30)), (1, 2, 4)]

    def submit(i: int) -> Request:
        return e.submit(prompts[i], SampleOpts(max_tokens=20, temperature=1.0, seed=i, rule=rule))  # type: ignore[arg-type]

    alone = []
    for i in range(len(prompts)):
        request = submit(i)
        e.run([request])
        alone.append(request.output)
    together = [submit(i) for i in range(len(prompts))]
    e.run(together)
    assert [r.output for r in together] == alone


def test_an_interrupt_anywhere_in_a_round_leaves_no_request_half_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at each call of a round in turn: its requests end, and the engine answers as before."""
    want = plain((1, 2, 3), 12, temperature=0.7)
    points = [
        (TableBackend, "forward"), (TableBackend, "commit"), (Request, "emit"), (decode, "decide"),
        (Decoder, "_emit"), (Decoder, "_propose"), (DraftModelDrafter, "_sync"), (DraftModelDrafter, "_advance"),
    ]  # fmt: skip
    for owner, name in points:
        for nth in range(3):
            e = engine(DraftModelDrafter(TableBackend(V)), 3)
            calls = itertools.count()
            original = getattr(owner, name)

            def interrupted(
                *args: Any, original: Any = original, calls: Any = calls, nth: int = nth, **more: Any
            ) -> Any:
                result = original(*args, **more)
                if next(calls) == 2 + nth:
                    raise KeyboardInterrupt
                return result

            running = [e.submit((1, 2, i), SampleOpts(max_tokens=40, temperature=0.7, seed=11)) for i in (3, 4)]
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    e.run(running)
            assert [r.finish for r in running] == ["cancelled", "cancelled"], (owner, name, nth)
            assert not e.running
            again = answer(e, (1, 2, 3), 12, temperature=0.7)
            assert again.output == want, (owner, name, nth)


def test_one_requests_failure_is_its_own() -> None:
    def logits(prefix: Sequence[int]) -> np.ndarray:
        return np.full(V, np.nan, dtype=np.float32) if prefix[0] == 4 and len(prefix) > 6 else table_logits(prefix, V)

    e = engine(random_drafter(V), 3, logits=logits)
    good = e.submit((1, 2, 3), SampleOpts.greedy(max_tokens=20))
    bad = e.submit((4, 1), SampleOpts.greedy(max_tokens=20))
    with pytest.raises(NumericalError):
        e.run([bad])
    assert bad.finish == "error"
    e.run([good])
    assert good.output == plain((1, 2, 3), 20, temperature=0.0)


def test_memory_of_idle_texts_is_given_up_for_running_ones() -> None:
    class Small(TableBackend):
        """Holds 40 tokens in all."""

        def forward(self, batch: Sequence[Rows], taps: Sequence[int] = ()) -> Any:
            if sum(map(len, self._held.values())) + sum(len(share.tokens) for share in batch) > 40:
                raise CapacityError("out of memory")
            return super().forward(batch, taps)

    e = Engine(Decoder(Small(V, positions=64)))
    answer(e, (1, 2, 3), 20, temperature=0.0)
    assert answer(e, (4, 4), 30, temperature=0.0).output == plain((4, 4), 30, temperature=0.0)
    with pytest.raises(CapacityError):
        answer(e, (4, 4), 60, temperature=0.0)
    assert not e.running


def test_tokens_per_second_leave_out_prefill_and_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, lambda rows: 5.0 if rows > 2 else 0.01)
    e = Engine(Decoder(machine.target()))
    for tokens in (1, 2, 7):
        stats = answer(e, (1, 2, tokens % V), tokens, temperature=0.0).stats
        assert stats.tokens_per_second == pytest.approx(100.0 if tokens > 1 else 0.0)

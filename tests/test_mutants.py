"""Seeded faults: each must be caught by a named check of the suite. A check that passes on a mutant proves nothing.

A mutant is one replaced piece of source. It is built and checked in a forked child, so that nothing leaks.
"""

from __future__ import annotations

import ast
import importlib
import multiprocessing
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import outpace
import test_controller
import test_decode
import test_drafters
import test_head_drafters
import test_sampling
import test_speculator
import test_verify

ORDER = [
    "sampling",
    "verify",
    "evidence",
    "costs",
    "budget",
    "controller",
    "slots",
    "drafters.chain",
    "drafters.draft_model",
    "drafters.tree",
    "drafters.head",
    "drafters.block",
    "decode",
    "engine",
    "speculator",
]
TESTS = [test_verify, test_sampling, test_decode, test_controller, test_drafters, test_head_drafters, test_speculator]


@dataclass(frozen=True)
class Mutant:
    """file: module under outpace. old -> new: the seeded fault. check: the test that catches it, with arguments."""

    file: str
    old: str
    new: str
    check: Callable[..., Any]
    args: tuple[Any, ...] = ()


law = test_verify.test_joint_law_of_rounds_is_the_targets
tree = test_verify.test_joint_law_of_a_tree_is_the_targets
lossless = test_decode.test_speculation_never_changes_a_token

MUTANTS: dict[str, Mutant] = {
    # -- verify.py
    "one-hot q forgotten": Mutant(
        "verify", "np.array([draft.tokens[i]]), np.ones(1))", "np.array([draft.tokens[i]]), np.full(1, 0.5))",
        law, ("rejection", "plain")),
    "<= for <": Mutant(
        "verify", "* q.prob(x) < target.prob(x)", "* q.prob(x) <= target.prob(x)",
        test_verify.test_a_token_the_target_cannot_emit_is_never_accepted),
    "p and q swapped": Mutant(
        "verify", "uniform(child) * q.prob(x) < target.prob(x)", "uniform(child) * target.prob(x) < q.prob(x)",
        law, ("rejection", "plain")),
    "correction drawn from p": Mutant(
        "verify", "target = residual(target, q)", "pass", law, ("rejection", "plain")),
    "bonus drawn from the wrong row": Mutant(
        "verify", "return Verdict(tuple(kept), draw(target, len(kept)))",
        "return Verdict(tuple(kept), draw(p(0) if len(kept) == len(draft) else target, len(kept)))",
        law, ("rejection", "plain")),
    "residual not renormalised": Mutant(
        "verify", "rest[keep] / rest[keep].sum()", "rest[keep]", test_verify.test_residual_is_renormalised),
    "empty residual not handled": Mutant(
        "verify", "return p\n    return Distribution", "pass\n    return Distribution",
        test_verify.test_equal_rows_up_to_round_off_leave_the_target_as_residual),
    "residual without clipping": Mutant(
        "verify", "np.maximum(rest, 0.0)", "np.abs(rest)", law, ("rejection", "plain")),
    "residual ignores q": Mutant(
        "verify", "rest[shared] -= q.probs[at[shared]]", "pass", law, ("rejection", "plain")),
    "second sibling judged against p again": Mutant(
        "verify", "target = residual(target, q)", "target = p(node + 1)", tree, ("plain",)),
    "match looks at the row of the draft, not before it": Mutant(
        "verify", "x = token(node + 1)", "x = token(max(node, 0))",
        test_verify.test_match_keeps_the_draft_while_it_is_the_targets_token),
    "match keeps a mismatch": Mutant(
        "verify", "if draft.tokens[child] == x]", "]",
        test_verify.test_match_keeps_the_draft_while_it_is_the_targets_token),
    "block weight not clipped": Mutant(
        "verify", "weight = min(1.0, weight * p(i)", "weight = (weight * p(i)", law, ("block", "plain")),
    "block weight not carried on": Mutant(
        "verify", "min(1.0, weight * p(i).prob(x)", "min(1.0, p(i).prob(x)", law, ("block", "plain")),
    "block correction without its weight": Mutant(
        "verify", "_q(draft, accepted), weights[accepted])", "_q(draft, accepted))", law, ("block", "plain")),
    "block stops at the first refusal": Mutant(
        "verify", "accepted = i + 1\n", "accepted = i + 1\n        else:\n            break\n",
        law, ("block", "plain")),
    "block denominator": Mutant(
        "verify", "r / (r + 1.0 - weight)", "r / (r + 1.0)", law, ("block", "plain")),
    # -- sampling.py
    "penalties miss the rows' own drafts": Mutant(
        "sampling", "counts = self._counts + Counter(ahead) if ahead else self._counts", "counts = self._counts",
        law, ("rejection", "frequency")),
    "bad words miss the rows' own drafts": Mutant(
        "sampling", "[*self.output, *ahead][-longest:]", "[*self.output][-longest:]", law, ("rejection", "bad_words")),
    "min_tokens misses the rows' own drafts": Mutant(
        "sampling", "len(self.output) + len(ahead) < (", "len(self.output) < (", law, ("block", "min_tokens")),
    "repetition penalty multiplies positive logits": Mutant(
        "sampling", "np.where(values > 0, values / np.float32(r), values * np.float32(r))", "values * np.float32(r)",
        law, ("rejection", "repetition")),
    "repetition penalty forgets the prompt": Mutant(
        "sampling", 'self._ids("prompt", self._prompt_tokens, strict=False)', "np.zeros(0, dtype=np.int64)",
        law, ("rejection", "repetition")),
    "repetition penalty misses the rows' own drafts": Mutant(
        "sampling", "seen = self._with(ahead)", "seen = self._seen", law, ("rejection", "repetition")),
    "frequency counts the prompt": Mutant(
        "sampling", "self._counts: Counter[int] = Counter()", "self._counts: Counter[int] = Counter(prompt)",
        law, ("rejection", "frequency")),
    "top_k keeps every tie at its edge": Mutant(
        "sampling", "np.flatnonzero(probs == kth)[: k - len(above)]", "np.flatnonzero(probs == kth)",
        test_sampling.test_ties_at_the_edge_of_a_filter_go_to_the_lowest_id),
    "filters not renormalised": Mutant(
        "sampling", "            probs = probs / probs.sum()\n", "", law, ("rejection", "all")),
    "noise without position": Mutant(
        "sampling", "self.choice, int(stream), *place)", "self.choice, int(stream))",
        test_sampling.test_keys_differ_in_every_part),
    "noise reused for two choices": Mutant(
        "sampling", "self.seed >> 64, self.choice, int(stream)", "self.seed >> 64, int(stream)",
        test_sampling.test_keys_differ_in_every_part),
    "one stream for draft and residual": Mutant(
        "sampling", "self.choice, int(stream), *place)", "self.choice, *place)",
        test_sampling.test_keys_differ_in_every_part),
    "accept numbers reused by the next round": Mutant(
        "sampling", "Stream.ACCEPT, self.position, depth)", "Stream.ACCEPT, depth)",
        test_sampling.test_every_round_uses_fresh_numbers_for_accept_and_residual),
    "match noise keyed by the round, not the position": Mutant(
        "sampling", "self.processed(logits, ahead), self.position + len(ahead))",
        "self.processed(logits, ahead), self.position)",
        lossless, ("hot",)),
    "drawn draft reported as one-hot": Mutant(
        "sampling", "self.position, self.position + len(ahead)), row",
        "self.position, self.position + len(ahead)), None",
        test_drafters.test_draft_tokens_are_coupled_to_the_targets_noise_or_carry_their_q),
    "drafts not coupled to the target's noise": Mutant(
        "sampling", 'if self.opts.rule == "match":', "if False:",
        test_drafters.test_draft_tokens_are_coupled_to_the_targets_noise_or_carry_their_q),
    "logprobs of the processed row": Mutant(
        "sampling", "if self.opts.processed_logprobs:", "if True:", test_sampling.test_logprobs_are_of_the_raw_target),
    # -- decode.py
    "one accepted row too many is committed": Mutant(
        "decode", "verdict.kept[: emitted - 1]", "verdict.kept[:emitted]",
        test_decode.test_an_end_token_inside_an_accepted_run_stops_exactly_there),
    "rejected rows are committed": Mutant(
        "decode", "rows = [*range(read), *(read + i for i in kept)]", "rows = range(read + len(draft))",
        lossless, ("greedy",)),
    "rows of a draft read the history without it": Mutant(
        "decode", "return draft.path(row - 1)", "return ()", lossless, ("penalties",)),
    "logits rows shifted by one": Mutant(
        "decode", "wanted = range(first, first + 1 + len(draft))", "wanted = range(first - 1, first + len(draft))",
        test_decode.test_first_two_tokens_follow_the_targets_law_on_the_whole_path, ("match",)),
    "generation goes on after an end token": Mutant(
        "decode", "            if request.emit(token):\n                break", "            request.emit(token)",
        test_decode.test_an_end_token_inside_an_accepted_run_stops_exactly_there),
    "logprobs of the next row": Mutant(
        "decode", "request.sampler.logprobs(logits[node + 1], token)", "request.sampler.logprobs(logits[node], token)",
        test_decode.test_logprobs_come_with_every_token_and_do_not_depend_on_drafts),
    "siblings take each other for parents": Mutant(
        "decode", "len(self.reading) + p for p in draft.parents", "first + i for i, p in enumerate(draft.parents)",
        test_decode.test_tree_drafts_give_the_same_tokens),
    # -- drafters, engine, speculator
    "the draft's cache keeps refused tokens": Mutant(
        "drafters.draft_model", "            self.model.truncate(cached.slot, same)\n", "            pass\n",
        test_drafters.test_draft_model_follows_the_text_by_common_prefix),
    "the draft's cache takes for agreed what it never compared": Mutant(
        "drafters.draft_model", "cached.agreed = same", "cached.agreed = 1 << 30",
        test_drafters.test_draft_model_follows_the_text_by_common_prefix),
    "steady requests draft by evidence": Mutant(
        "controller", "return self.fixed is not None or ask.evidence.steady", "return self.fixed is not None",
        test_controller.test_steady_requests_draft_a_fixed_length_from_the_main_source_in_any_company),
    "what a source lost does not stop it": Mutant(
        "controller", "self._rest > 0 or self._budget.left(source) <= 0.0", "self._rest > 0",
        test_controller.test_what_a_source_lost_stops_it_whatever_it_promises),
    "what was gained is not kept": Mutant(
        "budget", "min(_SAVED, max(-_OWED, self.left(source) + gained))", "self.left(source) + min(gained, 0.0)",
        test_controller.test_what_a_source_lost_stops_it_whatever_it_promises),
    "a sibling that was refused counts for nothing": Mutant(
        "evidence", "                for child in children:\n",
        "                for child in path[depth : depth + 1]:\n",
        test_controller.test_evidence_of_a_tree_judges_every_sibling_and_no_more_than_was_emitted),
    "a token without a row gains": Mutant(
        "evidence", "rank < verified and rank in path", "rank in path",
        test_controller.test_gains_of_a_tree_are_counted_by_rank_and_what_got_no_row_gained_nothing),
    "a draft goes on beyond what is left to say": Mutant(
        "controller", "n + stretch - len(plan.order), len(offer.gains)", "n + stretch - len(plan.order)",
        test_controller.test_no_draft_goes_on_beyond_what_its_request_can_use),
    "a reused slot keeps the old text": Mutant(
        "slots", """        try:
            self.backend.truncate(self._used[owner], length)
""", "        try:\n            pass\n",
        test_decode.test_a_prompt_that_leaves_an_old_one_cuts_it_off),
    "the generator keeps a stale cache": Mutant(
        "speculator", "            self.backend.truncate(self._slot, keep)\n", "            keep = len(self._tokens)\n",
        test_speculator.test_an_unrelated_context_starts_over),
    "an arg-max draft is judged by its softmax row": Mutant(
        "speculator", 'drawn = proposal.drawn or self.rule == "argmax-softmax"', "drawn = True",
        test_speculator.test_sampling_keeps_the_targets_law_for_drawn_and_greedy_drafts, (False,)),
    "a full acceptance without bonus emits one more": Mutant(
        "speculator", "return kept if len(kept) == n and not takes_bonus else", "return",
        test_speculator.test_self_speculation_equals_plain_greedy, ("reference-f32", None)),
    "passes that read say nothing of what a pass takes": Mutant(
        "costs", "unit = self._unit.value or 1.0", "unit = 1.0",
        test_controller.test_passes_that_read_are_the_scale_while_no_other_was_measured),
    "a draft that failed passes for one that ended": Mutant(
        "drafters.draft_model", "failed[chain.state] if chain.state in failed else chain", "chain",
        test_head_drafters.test_what_fails_for_one_text_leaves_the_others_their_drafts, ("model", "nan", "rejection")),
    # -- learned heads
    "what fails for one text fails for all": Mutant(
        "drafters.head", "            with apart(failed, growth.tree.state):\n", "            if True:\n",
        test_head_drafters.test_what_fails_for_one_text_leaves_the_others_their_drafts,
        ("tree", "constraint", "rejection")),
    "what fails for one text fails for all of its blocks": Mutant(
        "drafters.block", "            with apart(failed, draft.state):\n", "            if True:\n",
        test_head_drafters.test_what_fails_for_one_text_leaves_the_others_their_drafts, ("block", "nan", "rejection")),
    "candidates are the most probable tokens, whatever the noise": Mutant(
        "sampling", "pace = pace / exponentials(self.noise.key(Stream.TOKEN, place), tokens)", "pass",
        test_sampling.test_native_candidates_are_the_references, ((("temperature", 1.0),), None)),
    "bans are forgotten where only a head's tokens are looked at": Mutant(
        "sampling", "self._touched[1]\n            or", "False\n            or",
        test_sampling.test_candidates_of_some_tokens_alone_are_only_for_logits_that_stay_as_they_are),
    "siblings drawn with replacement": Mutant(
        "sampling", "left = row.tokens != token", "left = row.tokens >= 0",
        test_head_drafters.test_siblings_are_drawn_without_replacement),
    "a token's chance is not that of its whole path": Mutant(
        "drafters.tree", "before * chance", "chance", test_head_drafters.test_the_best_tree_of_all_there_are),
    "a branch forgets the tokens before it": Mutant(
        "drafters.tree", "path, want, sampler = self._path(node)", "path, want, sampler = ()",
        test_head_drafters.test_a_draft_of_fixed_length_is_a_chain_drawn_as_the_rule_wants_it),
    "siblings share a row": Mutant(
        "drafters.head", "growth.rows[node] = len(growth.rows) - 1", "growth.rows[node] = max(0, len(growth.rows) - 2)",
        test_head_drafters.test_the_best_tree_of_all_there_are),
    "a row is paired with its own token": Mutant(
        "drafters.head", "state.tokens[start + 1 : start + 1 + n]", "state.tokens[start : start + n]",
        test_head_drafters.test_the_text_goes_on_where_it_was_read),
    "a new text trusts the last row of the old one": Mutant(
        "drafters.head", "max(0, known - 1)", "known", test_head_drafters.test_the_text_goes_on_where_it_was_read),
    "the markov head hears the anchor only": Mutant(
        "drafters.block", "before = chain.tokens[-1]", "pass",
        test_head_drafters.test_a_block_is_drawn_with_the_markov_head_and_ends_where_its_own_confidence_says),
    "hidden states of refused tokens": Mutant(
        "decode", "result.taps[tap][part] for tap in taps",
        "result.taps[tap][first_row : first_row + len(at)] for tap in taps",
        test_head_drafters.test_hidden_states_are_those_of_the_text_in_the_heads_order, ("another's trees",)),
    "hidden states in the order of the layers": Mutant(
        "decode", "result.taps[tap][part] for tap in taps", "result.taps[tap][part] for tap in sorted(taps)",
        test_head_drafters.test_hidden_states_are_those_of_the_text_in_the_heads_order, ("its own",)),
    "tokens that only the target holds": Mutant(
        "decode", "if needed < held:", "if False:",
        test_head_drafters.test_a_seed_repeats_its_answer_whatever_was_held_or_shares_the_pass, ("rejection",)),
    "a head drafts before the answer's first token": Mutant(
        "decode", "(self.emitted > 0 or not", "(True or not",
        test_head_drafters.test_a_seed_repeats_its_answer_whatever_was_held_or_shares_the_pass, ("rejection",)),
}  # fmt: skip


def source(name: str) -> str:
    file = Path(outpace.__file__).parent / (name.replace(".", "/") + ".py")
    return file.read_text(encoding="utf-8")


def run_mutant(mutant: Mutant) -> None:
    """In a forked child: rebuilds the modules with the fault in place, then the tests on them; exits 0 if caught."""
    for name in ORDER:
        text = source(name)
        if name == mutant.file:
            text = text.replace(mutant.old, mutant.new, 1)
        module = importlib.import_module(f"outpace.{name}")
        exec(compile(text, f"<mutant of {name}>", "exec"), module.__dict__)
    for package in ("outpace.drafters", "outpace.api"):
        sys.modules.pop(package, None)
    for tests in TESTS:
        exec(compile(Path(tests.__file__ or "").read_text(encoding="utf-8"), tests.__name__, "exec"), tests.__dict__)
    check = getattr(sys.modules[mutant.check.__module__], mutant.check.__name__)
    try:
        check(*mutant.args)
    except BaseException:
        sys.exit(0)
    sys.exit(1)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str) -> None:
    mutant = MUTANTS[name]
    text = source(mutant.file)
    assert text.count(mutant.old) >= 1, "the mutant's source is gone: seed the fault anew"
    ast.parse(textwrap.dedent(text.replace(mutant.old, mutant.new, 1)))
    child = multiprocessing.get_context("fork").Process(target=run_mutant, args=(mutant,))
    child.start()
    child.join(120)
    survived = child.exitcode != 0
    child.kill()
    assert not survived, f"{mutant.check.__name__} passes on: {name}"


def test_the_checks_pass_without_a_mutant() -> None:
    """Rebuilding alone must not make a check fail: otherwise every mutant would look caught."""
    for check, args in sorted({(m.check, m.args) for m in MUTANTS.values()}, key=str):
        mutant = Mutant("verify", "", "", check, args)
        child = multiprocessing.get_context("fork").Process(target=run_mutant, args=(mutant,))
        child.start()
        child.join(120)
        assert child.exitcode == 1, check.__name__

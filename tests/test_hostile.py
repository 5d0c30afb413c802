"""What careless callers, broken parts and hostile model files do: a clear error, never a wrong answer, nothing lost."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import outpace
import outpace.decode
import outpace.drafters.draft_model
import outpace.drafters.head
import outpace.engine
import outpace.proposing
import outpace.slots
import tiny_folder
from fakes import FunctionDrafter, TableBackend, TableHead, random_drafter, table_logits
from outpace.api import LanguageModel
from outpace.controller import Controller
from outpace.decode import Decoder
from outpace.drafters import DraftModelDrafter, HeadDrafter
from outpace.engine import Engine
from outpace.text.template import ChatTemplate
from outpace.types import Distribution, Draft, HubError, ModelError, SampleOpts, UsageError

V = 5
INF = float("inf")


def language_model(drafter: Any = None, fixed: int | None = 3, **backend: Any) -> LanguageModel:
    drafters = () if drafter is None else (drafter,)
    return LanguageModel(TableBackend(V, **backend), None, drafters=drafters, draft_tokens=fixed)


def answer(model: LanguageModel, prompt: Any = (1, 2, 3), **opts: Any) -> list[int]:
    return model.generate(prompt, **{"max_tokens": 12, "seed": 3, "temperature": 0.9, **opts}).token_ids


# ------------------------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    "opts",
    [
        {"temperature": "hot"}, {"temperature": 10**400}, {"top_p": np.float64("nan")}, {"seed": 1.0}, {"seed": True},
        {"repetition_penalty": 1e-300}, {"repetition_penalty": 1e300}, {"presence_penalty": 1e300},
        {"frequency_penalty": -1e300}, {"logit_bias": {1: 1e300}}, {"logit_bias": {1: INF}}, {"logit_bias": [1]},
        {"logit_bias": {1.5: 1.0}}, {"logit_bias": {2**70: 1.0}}, {"logit_bias": {1: None}}, {"stop": None},
        {"stop": b"x"}, {"stop": 5}, {"stop_tokens": None}, {"stop_tokens": 5}, {"stop_tokens": (99,)},
        {"stop_tokens": (2**70,)}, {"allowed_tokens": (1.7,)}, {"allowed_tokens": "ab"}, {"banned_tokens": (2**70,)},
        {"banned_tokens": 5}, {"bad_words": ("ab",)}, {"bad_words": (1,)}, {"bad_words": [[1.5]]}, {"rule": []},
        {"ignore_eos": "no"}, {"min_tokens": 9, "max_tokens": 3}, {"constraint": 5}, {"taps": 5}, {"taps": "a"},
        {"nonsense": 1},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_options_are_usage_errors(opts: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        answer(language_model(), **opts)
    assert "\n" not in str(caught.value)
    assert any(name in str(caught.value) for name in opts)


@pytest.mark.parametrize("prompt", [b"abc", None, 5, [1.5], ["a"], [[1, 2]], [2**70], [-1], [True], []], ids=str)
def test_what_is_no_prompt_is_a_usage_error(prompt: Any) -> None:
    with pytest.raises(UsageError, match="prompt"):
        answer(language_model(), prompt)


def test_a_single_prompt_is_no_list_of_prompts() -> None:
    with pytest.raises(UsageError, match="list of prompts"):
        language_model().generate_many("ab")  # would have been two prompts


def test_numpy_values_lists_and_iterators_mean_what_they_hold() -> None:
    plain: dict[str, Any] = {
        "temperature": 0.5, "top_k": 3, "seed": 7, "bad_words": ((1, 2), (3,)), "stop_tokens": (4,),
        "allowed_tokens": (1, 2, 3, 4), "logit_bias": {1: 2.0},
    }  # fmt: skip
    odd: dict[str, Any] = {
        "temperature": np.float32(0.5), "top_k": np.int64(3), "seed": np.uint8(7), "bad_words": [[1, 2], np.array([3])],
        "stop_tokens": iter([4]), "allowed_tokens": np.array([1, 2, 3, 4]), "logit_bias": {np.int32(1): np.float32(2)},
    }  # fmt: skip
    opts = SampleOpts(max_tokens=9, **odd)
    assert opts == SampleOpts(max_tokens=9, **plain)
    many = language_model().generate_many([np.array([1, 2]), iter([1, 2])], opts)
    assert [r.token_ids for r in many] == [answer(language_model(), (1, 2), **plain | {"max_tokens": 9})] * 2
    json.dumps([(r.prompt_ids, r.token_ids) for r in many])  # plain integers


@pytest.mark.parametrize("value", [5e-324, 1e-300, 1e-30])
def test_a_tiny_temperature_is_greedy_without_a_warning(value: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert answer(language_model(), temperature=value) == answer(language_model(), temperature=0.0)


def test_a_huge_top_k_is_none() -> None:
    assert answer(language_model(), top_k=2**70) == answer(language_model())


def test_a_tap_named_twice_is_one() -> None:
    model = language_model()
    assert model.generate((1, 2), taps=(0, 0), max_tokens=3).taps[0].shape == (4, 4)


@pytest.mark.parametrize("name", [5, None, "", "x" * 5000, "~nobody-of-that-name/x"], ids=lambda x: str(x)[:10])
def test_what_is_no_model_name_is_a_hub_error(name: Any) -> None:
    with pytest.raises(HubError) as caught:
        outpace.load(name)
    assert len(str(caught.value)) < 200


def test_a_closed_model_says_so() -> None:
    model = language_model()
    model.close()
    model.close()
    with pytest.raises(UsageError, match="closed"):
        model.generate((1,))


# ------------------------------------------------------------------------------------------------------ broken helpers


class Odd:
    """Allows token ids in turn. result: what mask (or cut) gives back instead."""

    def __init__(self, result: Any = None, cut: Any = None, count: int = 0) -> None:
        self.result, self.cut_result, self.count = result, cut, count

    def mask(self, ahead: Sequence[int]) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return np.arange(V) == (self.count + len(ahead)) % V if self.result is None else self.result

    def cut(self, draft: Sequence[int]) -> Any:
        return len(draft) if self.cut_result is None else self.cut_result

    def advance(self, tokens: Sequence[int]) -> None:
        self.count += len(tokens)

    def fork(self) -> Odd:
        return Odd(self.result, self.cut_result, self.count)


@pytest.mark.parametrize(
    "mask", [np.ones(V), np.ones(V, int), np.ones(V - 1, bool), np.ones(V + 1, bool), np.ones((1, V), bool), [True] * V]
)
def test_a_mask_of_a_wrong_kind_is_refused(mask: Any) -> None:
    with pytest.raises(UsageError, match=r"constraint\.mask"):
        answer(language_model(), constraint=Odd(mask))


@pytest.mark.parametrize("cut", [-1, 99, 1.5, "x"])
def test_a_cut_that_makes_no_sense_is_refused(cut: Any) -> None:
    with pytest.raises(UsageError, match=r"constraint\.cut"):
        answer(language_model(random_drafter(V)), constraint=Odd(cut=cut))


def test_a_constraint_serves_any_number_of_answers() -> None:
    model, constraint = language_model(), Odd()
    opts = SampleOpts(constraint=constraint, max_tokens=4)
    assert [r.token_ids for r in model.generate_many([(1,), (2,)], opts)] == [[0, 1, 2, 3]] * 2
    assert model.generate((3,), opts).token_ids == [0, 1, 2, 3]


def test_a_request_that_fails_leaves_the_others_alone() -> None:
    model = language_model()
    want = answer(model)
    bad = model.stream((4, 4), constraint=Odd(ZeroDivisionError("mine")), max_tokens=20)
    assert answer(model) == want
    with pytest.raises(ZeroDivisionError, match="mine"):
        list(bad)
    assert answer(model) == want
    assert not model.engine.running


def _raise(*_: Any) -> Draft:
    raise ZeroDivisionError("broken")


def _q(tokens: list[int], probs: list[float]) -> Draft:
    return Draft((1,), (Distribution(np.array(tokens, dtype=np.int64), np.array(probs)),))


BROKEN: dict[str, Any] = {
    "raises": _raise,
    "no draft": lambda state, n: None,
    "outside": lambda state, n: Draft((V,)),
    "negative": lambda state, n: Draft((-1,)),
    "huge": lambda state, n: Draft((2**70,)),
    "fraction": lambda state, n: Draft((1.5,)),  # type: ignore[arg-type]
    "nan": lambda state, n: _q([1, 2], [np.nan, 1.0]),
    "nan elsewhere": lambda state, n: _q([1, 2], [1.0, np.nan]),
    "not drawn from q": lambda state, n: _q([2], [1.0]),
    "sums to 2": lambda state, n: _q([1], [2.0]),
    "unsorted": lambda state, n: _q([2, 1], [0.5, 0.5]),
    "empty": lambda state, n: _q([], []),
}


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_drafter_costs_a_warning_and_no_token(kind: str, rule: str) -> None:
    model = language_model(FunctionDrafter(BROKEN[kind]))
    with pytest.warns(UserWarning, match="left out") as caught:
        found = answer(model, rule=rule)
    assert len(caught) == 1
    # Without drafts the rejection rules draw from the target's rows.
    assert found == answer(language_model(), rule=rule)


def test_the_warning_points_out_of_the_package_where_python_can() -> None:
    def line(**opts: Any) -> tuple[str, int]:
        with pytest.warns(UserWarning, match="left out") as caught:
            answer(language_model(FunctionDrafter(_raise)), **opts)
        return caught[0].filename, caught[0].lineno

    filename, _ = line()
    assert line(max_tokens=3, rule="block") == line(prompt=[1] * 40)  # the same line from wherever it comes
    assert filename == (__file__ if sys.version_info >= (3, 12) else outpace.proposing.__file__)


def test_a_drafter_that_answers_for_too_few_is_left_out() -> None:
    drafter = FunctionDrafter(_raise)
    drafter.propose = lambda wanted: []  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="left out"):
        assert answer(language_model(drafter)) == answer(language_model())


def test_too_many_draft_tokens_and_numpy_ones_are_harmless() -> None:
    drafter = FunctionDrafter(lambda state, n: Draft(tuple(np.arange(50) % V)))
    result = language_model(drafter).generate((1, 2, 3), rule="rejection", temperature=2.0, seed=1, max_tokens=40)
    assert result.stats.accepted > 0
    assert {type(token) for token in result.token_ids} == {int}


# ------------------------------------------------------------------------------------------------- streams and threads


def test_a_stream_loses_nothing_when_another_call_works_on_it() -> None:
    model = language_model(random_drafter(V))
    want = model.generate((1, 2), max_tokens=30, seed=1, temperature=0.9)
    tokens: list[int] = []
    for i, delta in enumerate(model.stream((1, 2), max_tokens=30, seed=1, temperature=0.9)):
        tokens += delta.token_ids
        if i == 1:
            model.generate((3,), max_tokens=50)
    assert tokens == want.token_ids
    assert delta.result is not None
    assert delta.result.finish_reason == "length"


def test_a_stream_that_nobody_reads_leaves_nothing_behind() -> None:
    model = language_model()
    stream = model.stream((1, 2), max_tokens=30)
    del stream
    gc.collect()
    assert not model.engine.waiting
    assert not model.engine.running


def test_threads_share_a_model() -> None:
    model = language_model(random_drafter(V), slots=3)
    want = {i: answer(model, (i, 1), seed=i) for i in range(V)}
    wrong: list[Any] = []

    def work() -> None:
        for i in range(V):
            try:
                found = answer(model, (i, 1), seed=i)
            except Exception as error:
                found = error
            if found != want[i]:
                wrong.append(found)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(("kind", "step"), [("model", 11), ("head", 41)])
def test_ctrl_c_between_any_two_lines_loses_no_slot(kind: str, step: int) -> None:
    """KeyboardInterrupt at every few lines of the loop: afterwards the same answers, and no slot is missing."""
    sources = outpace.drafters.draft_model if kind == "model" else outpace.drafters.head
    files = {m.__file__ for m in (outpace.engine, outpace.decode, sources, outpace.slots)}
    prompts = [(1, 2, 3), (4,), (1, 2, 3, 4, 0, 1)]

    def engine() -> Engine:
        drafter: Any = DraftModelDrafter(TableBackend(V, slots=2))
        if kind == "head":
            drafter = HeadDrafter(TableHead(lambda path: table_logits(path, V), slots=2))
        return Engine(Decoder(TableBackend(V, slots=2, rows=8), (drafter,), Controller(3)))

    def go(e: Engine) -> list[list[int]]:
        requests = []
        try:
            for i, prompt in enumerate(prompts):
                requests.append(e.submit(prompt, SampleOpts(max_tokens=6, seed=i, temperature=0.8)))
            e.run(requests)
        finally:
            for request in requests:
                e.cancel(request)
        return [request.output for request in requests]

    def interrupted(e: Engine, at: int) -> int:
        """Runs with an interrupt at the given line (0: none); the lines seen."""
        seen = 0

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal seen
            if frame.f_code.co_filename not in files or frame.f_code.co_name == "submit":
                return None
            seen += event == "line"
            if event == "line" and seen == at:
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            go(e)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        return seen

    want = go(engine())
    first = engine()
    go(first)
    for at in range(1, interrupted(first, 0), step):
        e = engine()
        go(e)  # the second time, slots are taken over from the first
        interrupted(e, at)
        assert not e.running, at
        assert not e.waiting, at
        assert go(e) == want, at
        e.close()
        (drafter,) = e.decoder.drafters
        drafter.close()
        for backend in (e.decoder.target, getattr(drafter, kind)):
            assert not backend._held, at


# ---------------------------------------------------------------------------------------------------------- model files

BOMBS = {
    "slice": "{{ range(10)|slice(10**9)|list }}",
    "batch": "{{ [1]|batch(10**9, 'x')|list }}",
    "nested lists": "{% set ns=namespace(x=[1],y=[1]) %}{% for i in range(60) %}{% set ns.x=[ns.x,ns.x] %}"
    "{% set ns.y=[ns.y,ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "repeated lists": "{% set ns=namespace(x=[1],y=[1]) %}{% for i in range(60) %}{% set ns.x=[ns.x]*2 %}"
    "{% set ns.y=[ns.y]*2 %}{% endfor %}{{ ns.x in [ns.y] }}",
    "nested tuples": "{% set ns=namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x=(ns.x,ns.x) %}{% endfor %}"
    "{{ {ns.x: 1} }}",
    "nested dicts": "{% set ns=namespace(x={},y={}) %}{% for i in range(60) %}{% set ns.x=dict(a=ns.x,b=ns.x) %}"
    "{% set ns.y={'a':ns.y,'b':ns.y} %}{% endfor %}{{ ns.x == ns.y }}",
    "nested namespaces": "{% set ns=namespace(x=1) %}{% for i in range(60) %}{% set ns.x=namespace(a=ns.x,b=ns.x) %}"
    "{% endfor %}{{ ns.x }}",
    "long list, many times": "{% set x=range(100000)|list %}{% for i in range(100000) %}{% set y = x|length %}"
    "{% endfor %}",
    "long text, many times": "{% set x='a'*8000000 %}{% set y=x+'b' %}{% for i in range(100000) %}"
    "{% if x == y[:8000000] %}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_template_cannot_keep_the_machine_busy(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.text.sandbox.MAX_SECONDS", 0.5)
    with pytest.raises(ModelError, match="the chat template cannot be used"):
        ChatTemplate(BOMBS[kind]).render([{"role": "user", "content": "hello"}])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_folder.write(tmp_path)


def _change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("values", [{"temperature": "x"}, {"top_p": 0}, {"top_k": 1.5}, {"repetition_penalty": -1}])
def test_recommended_sampling_that_cannot_be_is_an_error_of_the_file(folder: Path, values: dict[str, Any]) -> None:
    _change(folder / "generation_config.json", do_sample=True, **values)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        outpace.load(folder)


@pytest.mark.parametrize("name", ["eos_token", "bos_token", "pad_token"])
def test_a_special_token_that_is_no_text_is_an_error(folder: Path, name: str) -> None:
    _change(folder / "tokenizer_config.json", **{name: "\ud800"})
    with pytest.raises(ModelError, match="Unicode"):
        outpace.load(folder)


@pytest.mark.parametrize("variables", [5, {"messages": []}, {"tools": []}, {1: 2}], ids=str)
def test_template_variables_of_a_wrong_kind(folder: Path, variables: Any) -> None:
    with outpace.load(folder, slots=1) as model, pytest.raises(UsageError, match="template"):
        model.chat([{"role": "user", "content": "a"}], template=variables)


@pytest.mark.parametrize("tools", [object(), "x", {"a": 1}], ids=str)
def test_tools_of_a_wrong_kind(folder: Path, tools: Any) -> None:
    with outpace.load(folder, slots=1) as model, pytest.raises(UsageError, match="tools"):
        model.chat([{"role": "user", "content": "a"}], tools=tools)


# -------------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_traceback(folder: Path, closed: str) -> None:
    command = f'exec "{sys.executable}" -m outpace generate hi -m "{folder}" --max-tokens 2 {closed}'
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr

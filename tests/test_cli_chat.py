"""`outpace chat`: messages, commands, and Ctrl-C."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outpace.api import Delta, Result
from outpace.cli.chat import SETTABLE, Session, read_message
from outpace.types import ContextError, ModelError, SampleOpts, Stats, UsageError


@dataclass
class FakeModel:
    """Answers with the words it was given; an exception among them is raised in their place."""

    answers: list[list[str | BaseException]]
    name: str = "fake"
    switches: tuple[str, ...] = ("enable_thinking",)
    positions: int = 4096
    finish: str = "stop"
    defaults: dict[str, Any] = field(default_factory=dict)
    seen: list[list[Mapping[str, Any]]] = field(default_factory=list)
    opts: list[SampleOpts] = field(default_factory=list)
    variables: list[dict[str, Any]] = field(default_factory=list)
    closed: int = 0

    def __post_init__(self) -> None:
        self.config = SimpleNamespace(max_position_embeddings=4096)
        self.target = SimpleNamespace(capacity=SimpleNamespace(positions=self.positions))
        self.template = SimpleNamespace(mentions=lambda name: name in self.switches)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        self.seen.append(list(messages))
        self.variables.append(variables)
        return [0] * 100

    def stream(self, prompt: list[int], opts: SampleOpts, *, speculate: bool) -> Iterator[Delta]:
        self.opts.append(opts)
        return self._deltas(self.answers.pop(0))

    def _deltas(self, words: list[str | BaseException]) -> Iterator[Delta]:
        try:
            for i, word in enumerate(words):
                if isinstance(word, BaseException):
                    raise word
                stats = Stats(
                    tokens=len(words), decode_tokens=len(words), rounds=2, drafted=8, accepted=4, decode_s=0.5
                )
                done = i == len(words) - 1
                result = Result("".join(map(str, words)), [], [], self.finish, 0, stats, []) if done else None
                yield Delta(word, [1], 0, result=result)
        finally:
            self.closed += 1


def talk(
    monkeypatch: pytest.MonkeyPatch, model: FakeModel, *lines: str, opts: SampleOpts | None = None, quiet: bool = False
) -> Session:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    session = Session(model, opts or SampleOpts(), quiet=quiet)  # type: ignore[arg-type]
    session.run()
    return session


def said(role: str, *contents: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for content in contents]


def test_a_conversation_grows_and_each_answer_has_its_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = FakeModel([["Hel", "lo."], ["Fine."]])
    session = talk(monkeypatch, model, "Hi", "", "How are you?", "/exit", "never sent")
    assert session.messages == [
        *said("user", "Hi"),
        *said("assistant", "Hello."),
        *said("user", "How are you?"),
        *said("assistant", "Fine."),
    ]
    assert model.seen == [session.messages[:1], session.messages[:3]]
    out, err = capsys.readouterr()
    assert out == "Hello.\nFine.\n"
    assert err.splitlines() == [
        "4.0 tokens/s, 50% of 8 drafted tokens accepted",
        "2.0 tokens/s, 50% of 8 drafted tokens accepted",
    ]


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = FakeModel([["Once ", KeyboardInterrupt()], [KeyboardInterrupt()], ["Yes."]])
    session = talk(monkeypatch, model, "A story", "Another", "Still there?")
    assert session.messages == [
        *said("user", "A story"),
        *said("assistant", "Once "),
        *said("user", "Still there?"),
        *said("assistant", "Yes."),
    ]
    assert model.closed == 3
    out, err = capsys.readouterr()
    assert out == "Once \n\nYes.\n"
    assert err.count("(stopped)") == 2


def test_ctrl_c_while_the_text_is_shown_cancels_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel([["a", "b", "c"], ["d"]])

    def show(text: str) -> None:
        if text == "b":
            raise KeyboardInterrupt

    monkeypatch.setattr("outpace.cli.chat.answering", lambda: contextlib.nullcontext(show))
    session = talk(monkeypatch, model, "x", "y", quiet=True)
    assert model.closed == 2
    assert [m["content"] for m in session.messages] == ["x", "ab", "y", "d"]


def test_an_error_is_told_and_the_message_taken_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = FakeModel([[ContextError("too long")], ["ok"]])
    session = talk(monkeypatch, model, "long", "short", quiet=True)
    assert session.messages == [*said("user", "short"), *said("assistant", "ok")]
    assert capsys.readouterr().err == "outpace: too long: /reset forgets the conversation\n"


def test_messages_over_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'one\\\ntwo\\\nthree\n"""\nfirst\n\nlast\n"""\n"""same line"""\n//shout\nend\\'
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    found = [read_message() for _ in range(6)]
    assert found == ["one\ntwo\nthree", "first\n\nlast", "same line", "//shout", "end", None]
    model = FakeModel([["ok"]])
    assert talk(monkeypatch, model, "//shout").messages[0]["content"] == "/shout"


def test_settings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = FakeModel([["1"], ["2"]])
    lines = [
        "/set temperature 0.5",
        "/set top-k 7",
        '/set stop ["###", "END"]',
        '/set logit_bias {"12": -3.5}',
        "/set rule block",
        "/set seed 3",
        "/think off",
        "/system Be brief.",
        "hi",
        "/set seed none",
        "/set stop .",
        "/think auto",
        "/system",
        "ho",
    ]
    talk(monkeypatch, model, *lines, quiet=True)
    first = {"temperature": 0.5, "top_k": 7, "stop": ("###", "END"), "logit_bias": {12: -3.5}, "rule": "block"}
    assert model.opts == [
        SampleOpts(**first, seed=3, max_tokens=1024),
        SampleOpts(**first | {"stop": (".",)}, max_tokens=1024),
    ]
    assert model.variables == [{"enable_thinking": False}, {}]
    assert model.seen[0] == [*said("system", "Be brief."), *said("user", "hi")]
    assert model.seen[1] == [*said("user", "hi"), *said("assistant", "1"), *said("user", "ho")]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "line",
    [
        "/nonsense",
        "/set temperature",
        "/set temperature hot",
        "/set temperature -1",
        "/set magic 1",
        "/set logit_bias 5",
        "/set constraint 5",
        "/think maybe",
        "/save",
        "/load",
        "/load /no/such/file",
        "/save /no/such/folder/file",
    ],
)
def test_wrong_commands_change_nothing(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = FakeModel([["ok"]])
    session = talk(monkeypatch, model, line, "hi", quiet=True)
    assert session.opts == SampleOpts()
    assert session.messages == [*said("user", "hi"), *said("assistant", "ok")]
    error = capsys.readouterr().err
    assert error.startswith("outpace: ")
    assert error.count("\n") == 1


def test_save_load_reset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    first = talk(monkeypatch, FakeModel([["é"]]), "/system S", "hi", f"/save {file}", quiet=True)
    assert json.loads(file.read_text(encoding="utf-8")) == first.messages
    second = talk(monkeypatch, FakeModel([]), f"/load {file}", quiet=True)
    assert second.messages == first.messages
    second.reset()
    assert second.messages == said("system", "S")


@pytest.mark.parametrize(
    "content", [b"[", b"{}", b"[]", b'[{"role": "king", "content": "x"}]', b"\xff", b"[" * 100_000]
)
def test_a_damaged_conversation_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_bytes(content)
    session = Session(FakeModel([]), SampleOpts(), quiet=True)  # type: ignore[arg-type]
    session.messages = said("user", "kept")
    with pytest.raises(UsageError, match=r"talk\.json"):
        session.load(str(file))
    assert session.messages == said("user", "kept")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "talk.json"
    file.write_text("old")
    session = Session(FakeModel([]), SampleOpts(), quiet=True)  # type: ignore[arg-type]

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ModelError, match="No space left"):
        session.save(str(file))
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_totals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    talk(monkeypatch, FakeModel([["a", "b"], ["c"]]), "x", "y", "/stats", quiet=True)
    assert capsys.readouterr().out.splitlines()[-1] == (
        "2 answers, 3 tokens in 4 rounds (0.75 tokens per round), 3.0 tokens/s, drafted 16, accepted 8"
    )


def test_one_answer_is_no_plural(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    talk(monkeypatch, FakeModel([["a"]]), "x", "/stats", quiet=True)
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 answer, 1 token in 2 rounds (")


def test_an_answer_that_was_cut_off_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = FakeModel([["a"], ["b"]], finish="length")
    talk(monkeypatch, model, "x", "/set max_tokens 9", "y", quiet=True)
    assert [opts.max_tokens for opts in model.opts] == [1024, 9]
    assert capsys.readouterr().err.splitlines() == [
        "(cut off after 1024 tokens; /set max_tokens N allows more)",
        "(cut off after 9 tokens; /set max_tokens N allows more)",
    ]


def test_a_full_context_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = FakeModel([["a"], [ContextError("no room")]], finish="length", positions=120)
    talk(monkeypatch, model, "x", "y", opts=SampleOpts(max_tokens=50), quiet=True)
    assert model.opts[0].max_tokens == 20
    way_out = "/reset forgets the conversation, or start again with a --context of up to 4096"
    assert capsys.readouterr().err.splitlines() == [
        f"(cut off: the context is full; {way_out})",
        f"outpace: no room: {way_out}",
    ]
    model = FakeModel([[ContextError("no room")]])  # all the model has: only /reset is left
    talk(monkeypatch, model, "x")
    assert capsys.readouterr().err == "outpace: no room: /reset forgets the conversation\n"


def test_thinking_needs_a_switch_in_the_template(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = talk(monkeypatch, FakeModel([], switches=()), "/think on", "/think auto", quiet=True)
    assert session.think is None
    error = capsys.readouterr().err
    assert error == "outpace: the chat template of fake has no switch for thinking (enable_thinking)\n"


def test_set_alone_lists_the_values(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = FakeModel([], defaults={"temperature": 0.6, "top_k": 20})
    talk(monkeypatch, model, "/set top_k 5", '/set stop ["#"]', "/set", quiet=True)
    values = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert set(values) == set(SETTABLE)
    expected = {"temperature": "0.6", "top_k": "5", "top_p": "none", "stop": '["#"]', "max_tokens": "1024"}
    assert expected.items() <= values.items()


def test_commands_that_worked_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    lines = ["/set temperature 0.5", "/system S", f"/save {file}", f"/load {file}", "/think off", "/reset", "/system"]
    talk(monkeypatch, FakeModel([]), *lines)
    assert capsys.readouterr().err.splitlines() == [
        "temperature is 0.5",
        "the system message is set",
        f"1 message written to {file}",
        f"1 message read from {file}",
        "thinking is off",
        "the conversation is forgotten, the system message stays",
        "the system message is removed",
    ]


def test_help_lists_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    talk(monkeypatch, FakeModel([]), "/help")
    text = capsys.readouterr().out
    for name in ("help", "reset", "system", "set", "think", "stats", "save", "load", "exit"):
        assert f"/{name}" in text


def test_errors_of_other_kinds_end_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError):
        talk(monkeypatch, FakeModel([[KeyError("bug")]]), "x")

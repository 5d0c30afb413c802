"""The command line: options arrive, output has its shape, errors are one line with the right exit code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import outpace
import tiny_folder
from outpace import api
from outpace.cli.app import build
from outpace.cli.quick import PlainValues
from outpace.types import SampleOpts, UsageError

SLOW = (  # to import; nothing of it is needed for the answer of a model that is there
    "pydantic", "huggingface_hub", "torch", "transformers", "safetensors", "scipy", "rich", "click",
    "asyncio", "concurrent", "email", "http", "logging", "multiprocessing", "requests", "httpx", "socket", "ssl",
    "unittest", "xml", "zipfile", "outpace.bench", "outpace.speculator", "outpace.models.export",
    "outpace.models.rounding", "outpace.drafters.block", "outpace.drafters.datastore", "outpace.drafters.draft_model",
    "outpace.drafters.head", "outpace.drafters.ngram", "outpace.heads.loading",
)  # fmt: skip
HEAVY = ("numpy", "tokenizers", "jinja2", "huggingface_hub", "outpace.api")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The NumPy backend, and an empty cache folder."""
    load = api.load
    monkeypatch.setattr(api, "load", lambda model, **more: load(model, **{"backend": "reference", **more}))
    monkeypatch.setenv("OUTPACE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def run(*args: str | Path, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(build(), [str(a) for a in args], input=stdin)


def generate(folder: Path, *args: str, stdin: str | bytes | None = None) -> dict[str, Any]:
    result = run("generate", "--model", folder, "--json", *args, stdin=stdin)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


# ---------------------------------------------------------------------------------------------------------- generate


def test_json_is_one_object_and_nothing_else(folder: Path) -> None:
    found = generate(folder, "the quick", "--temperature", "0", "--max-tokens", "7", "--ignore-eos", "--seed", "5")
    assert set(found) == {"text", "token_ids", "prompt_tokens", "finish_reason", "rounds", "seed", "model", "stats"}
    assert len(found["token_ids"]) == found["stats"]["tokens"] == 7
    assert found["finish_reason"] == "length"
    assert found["seed"] == 5
    assert found["model"] == str(folder)
    assert {"rounds", "drafted", "accepted", "tokens_per_second", "tokens_per_round"} <= set(found["stats"])
    with outpace.load(folder, backend="reference") as model:
        prompt = model.chat_ids([{"role": "user", "content": "the quick"}])
        result = model.generate(prompt, temperature=0.0, max_tokens=7, ignore_eos=True)
    assert (found["prompt_tokens"], found["token_ids"], found["text"]) == (len(prompt), result.token_ids, result.text)


def test_text_streams_to_stdout_and_statistics_to_stderr(folder: Path) -> None:
    args = ("a b", "--model", folder, "--max-tokens", "9", "--seed", "3", "--ignore-eos")
    shown = run("generate", *args)
    assert shown.exit_code == 0
    assert shown.stdout == generate(folder, "a b", "--max-tokens", "9", "--seed", "3", "--ignore-eos")["text"] + "\n"
    line = shown.stderr.strip()
    assert "\n" not in line
    for part in ("tokens/s", "9 tokens", "rounds", "tokens per round", "drafted", "accepted", "seed 3", "token limit"):
        assert part in line
    assert run("generate", *args, "--quiet").stderr == ""
    assert "\x1b" not in shown.output


@pytest.mark.parametrize("settings", ["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("draft", ["ngram", "suffix", "draft_model"])
def test_no_speculation_gives_the_same_tokens(folder: Path, settings: str, draft: str) -> None:
    few = ["--logit-bias", "9=20", "--logit-bias", "10=20"]  # an answer of two letters, in which a lookup finds much
    args = {
        "greedy": ["--temperature", "0", *few],
        "sampled": ["--temperature", "0.8", "--top-p", "0.9", "--seed", "11", *few],
        "penalised": ["--repetition-penalty", "1.2", "--frequency-penalty", "0.1", "--seed", "2", *few],
    }[settings]
    args += ["--max-tokens", "40", "--ignore-eos", "--draft-tokens", "3", "--draft", draft]
    args += ["--draft-model", str(folder)] if draft == "draft_model" else []
    fast = generate(folder, "one two one two one two one", *args)
    plain = generate(folder, "one two one two one two one", *args, "--no-speculation")
    assert fast["token_ids"] == plain["token_ids"]
    assert fast["text"] == plain["text"]
    assert plain["stats"]["drafted"] == 0
    assert plain["stats"]["rounds"] == 40
    assert fast["stats"]["drafted"] > 0
    if draft == "draft_model":  # the model itself with the same noise: every draft is right
        assert fast["stats"]["accepted"] == fast["stats"]["drafted"]
        assert fast["stats"]["rounds"] == 10


def test_raw_leaves_out_the_template_and_the_system_message_enters_it(folder: Path) -> None:
    raw = generate(folder, "hello", "--raw", "--max-tokens", "1")["prompt_tokens"]
    plain = generate(folder, "hello", "--max-tokens", "1")["prompt_tokens"]
    system = generate(folder, "hello", "--system", "Be brief.", "--max-tokens", "1")["prompt_tokens"]
    thinking = generate(folder, "hello", "--think", "--max-tokens", "1")["prompt_tokens"]
    assert raw < plain < system
    assert thinking > plain
    assert generate(folder, "hello", "--no-think", "--max-tokens", "1")["prompt_tokens"] == plain
    assert run("generate", "x", "--raw", "--system", "y", "--model", folder).exit_code == 2


def test_the_prompt_may_come_from_a_file_or_stdin(folder: Path, tmp_path: Path) -> None:
    args = ("--temperature", "0", "--max-tokens", "4")
    expected = generate(folder, "naïve café", *args)["token_ids"]
    (tmp_path / "prompt.txt").write_text("naïve café\n", encoding="utf-8")
    assert generate(folder, "--file", str(tmp_path / "prompt.txt"), *args)["token_ids"] == expected
    assert generate(folder, *args, stdin="naïve café\n".encode())["token_ids"] == expected
    assert generate(folder, "-", *args, stdin="naïve café\r\n".encode())["token_ids"] == expected
    assert generate(folder, "naïve café\n", *args)["prompt_tokens"] > 0


def test_without_max_tokens_the_answer_ends_at_512_or_with_the_context(folder: Path) -> None:
    found = generate(folder, "x", "--context", "64", "--ignore-eos")
    assert found["prompt_tokens"] + found["stats"]["tokens"] == 64
    assert found["finish_reason"] == "length"


def test_more_min_tokens_than_the_default_limit_raise_it(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("outpace.cli.generate.DEFAULT_MAX_TOKENS", 5)
    assert generate(folder, "x", "--min-tokens", "9", "--ignore-eos")["stats"]["tokens"] == 9
    refused = run("generate", "x", "--min-tokens", "100000", "--model", folder)
    assert (refused.exit_code, refused.stdout) == (2, "")


def test_thinking_needs_a_switch_in_the_template(folder: Path, tmp_path: Path) -> None:
    plain = shutil.copytree(folder, tmp_path / "plain")
    settings = json.loads((plain / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (plain / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    for args in (["generate", "x", "--think"], ["generate", "x", "--no-think"], ["chat", "--think"]):
        refused = run(*args, "--model", plain, stdin="")
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert "has no switch for thinking" in refused.stderr


def test_an_answer_of_one_token_has_no_speed(folder: Path) -> None:
    line = run("generate", "x", "--max-tokens", "1", "--temperature", "0", "--model", folder).stderr
    assert line.startswith("1 token in 1 round (1.00 tokens per round), drafted 0, accepted 0")


def test_stop_and_logprobs(folder: Path) -> None:
    plain = generate(folder, "x", "--max-tokens", "30", "--temperature", "0", "--ignore-eos")
    stop = plain["text"][8:10]
    found = generate(
        folder, "x", "--max-tokens", "30", "--temperature", "0", "--ignore-eos", "--stop", stop, "--logprobs", "2"
    )
    assert found["text"] == plain["text"][: plain["text"].index(stop)]
    assert found["finish_reason"] == "stop"
    assert [entry["token"] for entry in found["logprobs"]] == found["token_ids"]
    assert all(len(entry["top"]) == 2 for entry in found["logprobs"])


def test_every_sampling_option_arrives(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    seen: list[SampleOpts] = []

    def stop_here(self: Any, prompt: Any, opts: SampleOpts, **more: Any) -> None:
        seen.append(opts)
        assert more == {"speculate": False}
        raise UsageError("seen")

    monkeypatch.setattr(api.LanguageModel, "generate", stop_here)
    wanted: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "typical_p": 0.8,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 4,
        "max_tokens": 9,
        "min_tokens": 2,
        "rule": "block",
        "logprobs": 3,
    }
    args = [part for name, value in wanted.items() for part in ("--" + name.replace("_", "-"), str(value))]
    args += ["--logit-bias", "3=-inf", "--logit-bias", "4=1.5", "--stop", "a", "--stop", "b,c", "--ignore-eos"]
    run("generate", "x", "--json", "--no-speculation", "--model", folder, *args)
    biases = {3: float("-inf"), 4: 1.5}
    assert seen == [SampleOpts(**wanted, logit_bias=biases, stop=("a", "b,c"), ignore_eos=True)]


def test_every_model_option_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []

    def stop_here(model: str, **more: Any) -> None:
        seen.append((model, more))
        raise UsageError("seen")

    monkeypatch.setattr(api, "load", stop_here)
    args = "--draft draft_model --draft-model b --draft-tokens 3 --precision f32 --context 99 --threads 2 --offline"
    args += " --no-cache --kv-cache q8"
    for command in ("generate", "chat"):
        run(command, *(["x"] if command == "generate" else []), "--model", "a", *args.split())
    expected = {"draft": "draft_model", "draft_model": "b", "draft_tokens": 3, "precision": "f32", "context": 99}
    expected |= {"threads": 2, "cache": False, "offline": True, "slots": 1, "progress": True, "datastore": None}
    expected |= {"kv_cache": "q8", "head": None, "draft_layers": None}
    assert seen == [("a", expected)] * 2
    run("generate", "x", "--draft", "datastore", "--datastore", "c")
    assert seen[-1][0] == api.DEFAULT_MODEL
    assert (seen[-1][1]["draft"], seen[-1][1]["datastore"]) == ("datastore", "c")
    run("generate", "x", "--draft", "self", "--draft-layers", "2")
    assert (seen[-1][1]["draft"], seen[-1][1]["draft_layers"]) == ("self", 2)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["generate", ""], 2, "the prompt is empty"),
        (["generate", "x", "--temperature", "-1"], 2, "temperature must be"),
        (["generate", "x", "--top-p", "1.5"], 2, "top_p must be"),
        (["generate", "x", "--max-tokens", "0"], 2, "max_tokens must be"),
        (["generate", "x", "--rule", "guess"], 2, "rule must be one of match, rejection, block"),
        (["generate", "x", "--logit-bias", "abc"], 2, "--logit-bias wants ID=BIAS"),
        (["generate", "x", "--logit-bias", "999999=1"], 2, "999999"),
        (["generate", "x", "--logprobs", "2"], 2, "--logprobs needs --json"),
        (["generate", "x", "--draft", "magic"], 2, "draft must be one of"),
        (["generate", "x", "--draft-tokens", "16"], 2, "draft_tokens must be in 0 .. 15"),
        (["generate", "x", "--draft", "draft_model"], 2, "--draft draft_model needs --draft-model NAME"),
        (["generate", "x", "--draft", "ngram", "--draft-model", "y"], 2, "--draft-model and --draft ngram exclude"),
        (["generate", "x", "--draft", "eagle3"], 2, "--draft eagle3 needs --head PATH"),
        (["generate", "x", "--draft", "suffix", "--head", "y"], 2, "--head and --draft suffix exclude"),
        (["generate", "x", "--draft", "datastore"], 2, "--draft datastore needs --datastore FILE"),
        (["generate", "x", "--draft", "none", "--datastore", "y"], 2, "--datastore and --draft none exclude"),
        (["generate", "x", "--draft-layers", "2"], 2, "--draft-layers and --draft auto exclude each other"),
        (["generate", "x", "--draft", "self", "--draft-layers", "9"], 2, "draft_layers must be in 1 .. 3"),
        (
            ["generate", "x", "--draft", "none", "--draft-tokens", "5"],
            2,
            "--draft-tokens 5 needs a drafter: --draft none",
        ),
        (["generate", "x", "--top-k", "x"], 2, "'--top-k'"),
        (["generate", "x", "--nonsense"], 2, "--nonsense"),
        (["nonsense"], 2, "nonsense"),
        (["generate", "x", "--precision", "int2"], 2, "precision must be"),
        (["generate", "x", "--kv-cache", "q4"], 2, "kv_cache must be auto, f32, f16, q8, got 'q4'"),
        (["generate", "x", "--context", "100000"], 2, "context must be in"),
        (["generate", "x " * 400], 2, "context"),
        (["generate", "x", "--max-tokens", "100000"], 2, "exceed the context"),
        (["generate", "x", "--file", "y"], 2, "not both"),
        (["generate", "--file", "no-such-file"], 2, "no-such-file: No such file"),
        (["generate", "--file", "."], 2, "Is a directory"),
        (["rm", "smollm2-135m"], 1, "smollm2-135m is not in"),
        (["info", "smollm2-135m"], 1, "outpace pull smollm2-135m"),
    ],
)
def test_errors_are_one_line_with_an_exit_code(folder: Path, args: list[str], code: int, message: str) -> None:
    result = run(*args, *(["--model", str(folder)] if args[0] == "generate" else []))
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.startswith("outpace: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


@pytest.mark.parametrize("model", ["no/such-model", "./nowhere", "smollm2-135m", "what is this"])
def test_an_unknown_model_is_a_failure(model: str) -> None:
    result = run("generate", "x", "--model", model, "--offline")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("outpace: ")
    assert result.stderr.count("\n") == 1


def test_text_that_is_not_utf8_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes("café".encode("latin-1"))
    for result in (
        run("generate", "--model", folder, "--file", tmp_path / "latin1.txt"),
        run("generate", "--model", folder, stdin=b"\xff\xfe"),
    ):
        assert result.exit_code == 2
        assert "not UTF-8 text at byte" in result.stderr
    assert run("generate", "--model", folder, stdin="\n").exit_code == 2


def test_a_damaged_model_is_a_failure_and_a_bug_shows_no_traceback(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(40))
    result = run("generate", "x", "--model", tmp_path / "bad.gguf")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "bad.gguf" in result.stderr

    def broken(*args: Any, **more: Any) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(api.LanguageModel, "stream", broken)
    result = run("generate", "x", "--model", folder)
    assert result.exit_code == 1
    assert "unexpected KeyError" in result.stderr
    assert "Traceback" not in result.output
    assert isinstance(run("generate", "x", "--model", folder, "--debug").exception, KeyError)


def test_ctrl_c_ends_generate_with_130(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **more: Any) -> Iterator[api.Delta]:
        yield api.Delta("partial", [1], 0)
        raise KeyboardInterrupt

    monkeypatch.setattr(api.LanguageModel, "stream", interrupted)
    result = run("generate", "x", "--model", folder)
    assert result.exit_code == 130
    assert result.stdout == "partial\n"
    assert result.stderr == "(stopped) 1 token in 1 round\n"
    assert run("generate", "x", "--model", folder, "--quiet").stderr == "(stopped)\n"


def test_a_model_shows_what_it_is(folder: Path) -> None:
    with outpace.load(folder, backend="reference", context=99, draft="ngram") as model:
        layers = tiny_folder.CONFIG.num_hidden_layers
        assert repr(model) == f"<LanguageModel {folder}: qwen3, {layers} layers, context 99, drafter ngram>"
    assert repr(model).endswith(", closed>")


# ------------------------------------------------------------------------------------------------------ other commands


def test_info_describes_a_model(folder: Path) -> None:
    facts = json.loads(run("info", folder, "--json").stdout)
    config = tiny_folder.CONFIG
    assert facts["architecture"] == "qwen3"
    assert facts["layers"] == config.num_hidden_layers
    assert facts["context"] == config.max_position_embeddings
    assert facts["bytes"] > 4 * facts["parameters"]  # float32 and a header
    assert facts["bytes"] < 4 * facts["parameters"] + 10_000
    assert set(facts["tensors"]) == {"F32"}
    text = run("info", folder).stdout
    assert "architecture  qwen3\n" in text
    assert f"tensors       F32 x{facts['tensors']['F32']}\n" in text
    assert f"tokenizer     byte-level BPE, {config.vocab_size} tokens\n" in text
    assert f"size          {facts['bytes'] / 1000:.0f} kB\n" in text


def test_models_lists_what_was_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    from outpace import hub

    empty = run("models")
    assert (empty.exit_code, empty.stdout) == (0, "")
    assert "outpace pull smollm2-135m" in empty.stderr
    assert json.loads(run("models", "--json").stdout) == []
    found = [hub.ModelInfo("org/long-name", Path("/m/a"), 1_234_000_000, "safetensors")]
    monkeypatch.setattr(hub, "list_models", lambda: found)
    assert json.loads(run("models", "--json").stdout) == [
        {"name": "org/long-name", "bytes": 1_234_000_000, "kind": "safetensors", "path": "/m/a"}
    ]
    header, row = run("models").stdout.splitlines()
    assert header.split() == ["NAME", "SIZE", "KIND", "PATH"]
    assert row.split() == ["org/long-name", "1.2", "GB", "safetensors", "/m/a"]
    assert header.index("KIND") == row.index("safetensors")


# ------------------------------------------------------------------------------------------------- as a real process


def process(*args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outpace", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **more)


def test_help_and_version_load_nothing_heavy() -> None:
    code = f"""
import sys
from outpace.cli.app import build
from outpace.cli.quick import PlainValues
try:
    build()(["--help"])
except SystemExit as end:
    assert end.code == 0
loaded = [name for name in {HEAVY!r} if name in sys.modules]
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout
    for command in ([], ["generate"], ["chat"]):
        text = process(*command, "--help").stdout
        assert "<bool>" not in text
    assert f"({api.DEFAULT_MODEL})" in text
    done = process("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"outpace {outpace.__version__}\n", "")


@pytest.mark.parametrize("args", [["--nonsense"], ["nonsense"], ["generate", "--top-k", "x"], ["generate", "a", "b"]])
def test_wrong_usage_exits_with_2(args: list[str]) -> None:
    done = process(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr


def test_errors_of_a_process_are_one_line(tmp_path: Path) -> None:
    done = process("generate", "x", "--model", "no/such-model", env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("outpace: no/such-model is not on this machine")
    assert done.stderr.count("\n") == 1


def test_a_reader_that_leaves_early_is_no_error() -> None:
    script = """
import os, sys
from outpace.cli.command import command
from outpace.cli.terminal import show
import typer
app = typer.Typer(pretty_exceptions_enable=False)
def talk() -> None:
    for _ in range(100_000):
        show("word " * 20)
app.command()(command(talk))
app([])
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.read(100)
    child.stdout.close()
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait(60) == 141


# ------------------------------------------------------------------------------------------------------ a quick start


def outcome(monkeypatch: pytest.MonkeyPatch, args: str) -> tuple[list[Any], int, str]:
    seen: list[Any] = []

    def stop_here(model: str, **more: Any) -> None:
        seen.append((model, more))
        raise UsageError("seen")

    monkeypatch.setattr(api, "load", stop_here)
    result = run("generate", "x", *args.split())
    return seen, result.exit_code, result.stderr


@pytest.mark.parametrize(
    "args",
    [
        "",
        "--context 12 --threads 007 --draft ngram --draft-tokens -3",
        "--max-tokens 1 --seed 18446744073709551615",
        "--temperature 0.5 --top-p 1 --stop a --stop b --logit-bias 3=-1",
        "--context x",
        "--context 1.5",
        "--context \u0663",
        "--context=",
        "--context --",
        "--temperature warm",
        "--file no-such-file",
    ],
)
def test_plain_values_are_read_as_typer_reads_them(args: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = outcome(monkeypatch, args)
    monkeypatch.setattr(PlainValues, "install", lambda param: None)
    assert quick == outcome(monkeypatch, args)


def test_generate_brings_only_what_it_needs(folder: Path, tmp_path: Path) -> None:
    script = f"""
import os, sys
from outpace.cli import quick
from outpace.cli.app import main
def leave(end):
    loaded = [name for name in {SLOW!r} if name in sys.modules]
    print(end.code, loaded, file=sys.stderr)
    os._exit(7)
sys.modules["outpace.cli.app"].leave = leave
sys.argv = ["outpace", "generate", "--model", {str(folder)!r}, "--max-tokens", "1", "--quiet", "hi"]
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (7, "None []\n")


def test_all_output_is_out_when_the_process_ends(folder: Path, tmp_path: Path) -> None:
    """The quick end must not lose what is still in a buffer, nor the exit code."""
    file = tmp_path / "out"
    with file.open("w") as out:
        args = [sys.executable, "-m", "outpace", "info", str(folder), "--json"]
        assert subprocess.run(args, stdout=out, check=False, timeout=120).returncode == 0
    assert json.loads(file.read_text())["layers"] == 3

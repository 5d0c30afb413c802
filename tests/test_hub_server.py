"""Pulling from the Hugging Face Hub, against a small local server that speaks the part of its protocol we need."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from outpace import hub
from outpace.types import HubError

COMMIT = "a" * 40
WEIGHTS = bytes(range(256)) * 2000
FILES = {
    "config.json": b'{"model_type": "qwen3"}',
    "tokenizer.json": b"{}",
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"tools",
    "model.safetensors": WEIGHTS,
    "consolidated.safetensors": WEIGHTS[::-1],
    "pytorch_model.bin": b"pickle",
    "modeling.py": b"print('code')",
    "onnx/model.onnx": b"onnx",
    "onnx/config.json": b"{}",
    "original/model.safetensors": b"other",
    "README.md": b"# readme",
}
GGUF = {"README.md": b"x", "sub/m-Q4_K_M.gguf": b"GGUF4" * 100, "m-Q8_0.gguf": b"GGUF8" * 100, "config.json": b"{}"}
SPLIT = {"m-Q2_K-00001-of-00002.gguf": b"1", "m-Q2_K-00002-of-00002.gguf": b"2"}
REPOS = {
    "org/model": FILES,
    "org/quants": GGUF | SPLIT,
    "org/pickled": {"pytorch_model.bin": b"pickle", "config.json": b"{}"},
    "org/evil": {"config.json": b"{}", "model.safetensors": b"w", "../../escape.json": b"{}", "/abs.json": b"{}"},
    "org/damaged": {"config.json": b"{}", "model.safetensors": b"right"},
}


class Server(ThreadingHTTPServer):
    """Keeps what was asked for; `break_after` cuts the next weights download after so many bytes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.asked: list[tuple[str, str, str | None]] = []
        self.break_after: list[int] = []
        self.token: str | None = None


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append((self.command, path, self.headers.get("Range")))
        if path.startswith(("/api/models/org/private", "/org/private")):
            return self._error(401, "RepoNotFound")
        if path.startswith("/api/models/org/gated"):
            return self._error(403, "GatedRepo")
        if path.startswith("/api/models/org/down"):
            return self._error(503, None)
        if self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            return self._error(401, None)
        if found := re.fullmatch(r"/api/models/(org/[^/]+)(?:/revision/([^/]+))?", path):
            return self._info(*found.groups())
        if found := re.fullmatch(r"/api/models/(org/[^/]+)/tree/[^/]+", path):
            return self._json([self._entry(n, d, True) for n, d in REPOS[found[1]].items()])
        if found := re.fullmatch(r"/(org/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._file(REPOS[found[1]][found[3]])
        return self._error(404, "RepoNotFound")

    def _info(self, repo: str, revision: str | None) -> None:
        if repo not in REPOS:
            return self._error(404, "RepoNotFound")
        if revision not in (None, "main", "v1", COMMIT):
            return self._error(404, "RevisionNotFound")
        files = [self._entry(n, d, False) for n, d in REPOS[repo].items()]
        return self._json({"id": repo, "sha": COMMIT, "siblings": files})

    def _entry(self, name: str, data: bytes, tree: bool) -> dict[str, object]:
        """A file as the model's page lists it, or as its tree does: the two differ in their spelling."""
        digest = hashlib.sha1(data).hexdigest()
        sha256 = hashlib.sha256(b"wrong" if data == b"right" else data).hexdigest()
        lfs = {"size": len(data), "pointerSize": 1} if name.endswith((".safetensors", ".gguf")) else None
        if tree:
            entry = {"type": "file", "path": name, "oid": digest, "size": len(data)}
            return entry | ({"lfs": lfs | {"oid": sha256}} if lfs else {})
        entry = {"rfilename": name, "blobId": digest, "size": len(data)}
        return entry | ({"lfs": lfs | {"sha256": sha256}} if lfs else {})

    def _file(self, data: bytes) -> None:
        start = 0
        if asked := self.headers.get("Range"):
            start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1])
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Linked-Size", str(len(data)))
        self.send_header("Content-Length", str(len(data) - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if data is WEIGHTS and self.server.break_after:
            self.wfile.write(data[start : start + self.server.break_after.pop(0)])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
            return
        self.wfile.write(data[start:])

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _error(self, status: int, code: str | None) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def server(monkeypatch, tmp_path):
    running = Server()
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_ENDPOINT", running.url)
    monkeypatch.setenv("OUTPACE_HOME", str(tmp_path / "home"))
    yield running
    running.shutdown()
    running.server_close()


def tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_pull_into_a_log_is_one_line(server, capfd):
    hub.pull("org/model")
    hub.pull("org/model")  # nothing is missing: nothing to say
    assert re.fullmatch(r"fetching org/model \(\d+ MB\)\n", capfd.readouterr().err)


def test_a_model_is_pulled_without_what_it_does_not_need(server):
    with pytest.raises(HubError, match="run `outpace pull org/model`"):
        hub.resolve("org/model")
    assert server.asked == []  # nothing large is fetched unasked
    folder = hub.pull("org/model", progress=False)
    wanted = {f: FILES[f] for f in FILES if f not in ("consolidated.safetensors", "README.md")}
    wanted = {
        f: d for f, d in wanted.items() if f.split("/")[0] not in ("onnx", "original") and f[-3:] not in ("bin", ".py")
    }
    assert tree(folder) == wanted
    assert len(wanted) == 6
    assert not any(re.search(r"\.(bin|py|onnx|md)$", path) for _, path, _ in server.asked)
    assert hub.resolve("org/model") == folder
    [info] = hub.list_models()
    assert (info.name, info.path, info.kind) == ("org/model", folder, "safetensors")
    assert info.bytes == sum(map(len, wanted.values()))


def test_a_second_pull_fetches_no_file_again(server):
    hub.pull("org/model", progress=False)
    server.asked.clear()
    hub.pull("org/model@v1", progress=False)
    assert not [a for a in server.asked if a[0] == "GET" and "/resolve/" in a[1]]
    assert [info.name for info in hub.list_models()] == ["org/model", "org/model@v1"]
    hub.remove("org/model")
    assert "model.safetensors" in tree(hub.resolve("org/model@v1"))  # shared files stay
    hub.remove("org/model@v1")
    assert hub.list_models() == []
    assert not list(hub.home().glob("hub/*"))


def test_a_broken_download_resumes(server, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # what is written at once
    server.break_after = [100_000, 50_000]
    folder = hub.pull("org/model", progress=False)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [r for m, p, r in server.asked if m == "GET" and p.endswith("/model.safetensors")]
    starts = [0 if r is None else int(r[6:-1]) for r in ranges]
    assert len(starts) == 3
    assert 0 == starts[0] < starts[1] < starts[2]


def test_a_pull_that_was_given_up_goes_on_later(server, monkeypatch):
    import huggingface_hub.file_download as file_download

    real = file_download.http_get

    def killed(url, stream, **kwargs):
        if url.endswith("/model.safetensors"):
            stream.write(WEIGHTS[:300_000])
            raise KeyboardInterrupt
        real(url, stream, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(file_download, "http_get", killed)
        with pytest.raises(KeyboardInterrupt):
            hub.pull("org/model", progress=False)
    assert hub.list_models() == []
    with pytest.raises(HubError, match="outpace pull"):
        hub.resolve("org/model")
    server.asked.clear()
    folder = hub.pull("org/model", progress=False)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    again = [r for m, p, r in server.asked if m == "GET" and p.endswith("/model.safetensors")]
    assert again == ["bytes=300000-"]
    assert not [f for f in tree(hub.home()) if f.endswith(".part")]


def test_a_new_commit_fetches_only_what_changed(server, monkeypatch):
    old = hub.pull("org/model", progress=False)
    server.asked.clear()
    monkeypatch.setattr("test_hub_server.COMMIT", "b" * 40)
    monkeypatch.setitem(REPOS, "org/model", FILES | {"config.json": b"[1]"})
    new = hub.pull("org/model", progress=False)
    assert [p.split("/")[-1] for m, p, _ in server.asked if "/resolve/" in p] == ["config.json"]
    assert (new / "model.safetensors").read_bytes() == WEIGHTS
    assert (new / "config.json").read_bytes() == b"[1]"
    assert not old.exists()  # nothing of the old commit is left to take up space


def test_a_wrong_or_overlong_part_is_not_kept(server):
    folder = hub.pull("org/model", progress=False)
    hub.remove("org/model")
    for junk in (b"x" * 1000, WEIGHTS + b"more"):
        folder.mkdir(parents=True)
        (folder / "model.safetensors.part").write_bytes(junk)
        if junk[0] == b"x"[0]:
            with pytest.raises(HubError, match="damaged"):
                hub.pull("org/model", progress=False)
        assert (hub.pull("org/model", progress=False) / "model.safetensors").read_bytes() == WEIGHTS
        hub.remove("org/model")


def test_two_processes_pull_at_once(server):
    program = "from outpace import hub; print(hub.pull('org/model', progress=False))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = {p.communicate()[0].strip() for p in running}
    assert [p.returncode for p in running] == [0, 0]
    assert answers == {str(hub.resolve("org/model"))}
    assert len([p for m, p, _ in server.asked if p.endswith("/model.safetensors")]) == 1  # the second one waited


def test_one_gguf_file(server):
    path = hub.pull("org/quants:q4_k_m", progress=False)
    assert path.name == "m-Q4_K_M.gguf"
    assert path.read_bytes() == GGUF["sub/m-Q4_K_M.gguf"]
    other = hub.pull("org/quants:m-Q8_0.gguf", progress=False)
    assert hub.resolve("org/quants:m-Q8_0.gguf") == other
    assert {i.name: i.kind for i in hub.list_models()} == {
        "org/quants:q4_k_m": "gguf",
        "org/quants:m-Q8_0.gguf": "gguf",
    }
    assert sum("/resolve/" in p and m == "GET" for m, p, _ in server.asked) == 2
    hub.remove("org/quants:q4_k_m")
    assert not path.exists()
    assert other.exists()
    assert GGUF["sub/m-Q4_K_M.gguf"] not in tree(hub.home()).values()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/none", "has no model org/none; if it is private, set HF_TOKEN"),
        ("org/private", "has no model org/private; if it is private, set HF_TOKEN"),
        ("org/gated", "org/gated is gated: accept its terms at http"),
        ("org/down", "answered 503 for org/down"),
        ("org/model@nope", "no such revision: org/model@nope"),
        ("org/quants", r"holds GGUF files: name one, as in org/quants:"),
        ("org/quants:Q5_0", "no GGUF file named Q5_0; there are"),
        ("org/quants:Q2_K-00001-of-00002", "split GGUF"),
        ("org/pickled", "but pickles .pytorch_model.bin., which can run code"),
        ("org/damaged", "model.safetensors arrived damaged"),
    ],
)
def test_errors_say_what_to_do(server, name, message):
    with pytest.raises(HubError, match=message) as error:
        hub.pull(name, progress=False)
    assert "\n" not in str(error.value)
    assert hub.list_models() == []


def test_listed_paths_cannot_leave_the_cache(server, tmp_path):
    folder = hub.pull("org/evil", progress=False)
    assert sorted(tree(folder)) == ["config.json", "model.safetensors"]
    assert not [p for p in tmp_path.rglob("*") if p.name in ("escape.json", "abs.json")]


def test_the_token_is_sent(server, monkeypatch):
    server.token = "secret"
    with pytest.raises(HubError, match="HF_TOKEN"):
        hub.pull("org/model", progress=False)
    hub.pull("org/model", progress=False, token="secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.pull("org/quants:Q8_0", progress=False)


def test_offline(server, monkeypatch):
    for offline, variable in ((True, None), (False, "1")):
        if variable:
            monkeypatch.setenv("HF_HUB_OFFLINE", variable)
        with pytest.raises(HubError, match="offline mode is on"):
            hub.pull("org/model", offline=offline)
    assert server.asked == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    folder = hub.pull("org/model", progress=False)
    server.asked.clear()
    assert hub.pull("org/model", offline=True) == folder == hub.resolve("org/model", offline=True)
    assert server.asked == []


def test_nobody_listens(monkeypatch, tmp_path):
    monkeypatch.setenv("OUTPACE_HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        HubError, match=r"could not be fetched from http://127.0.0.1:9: .*; check the connection"
    ) as error:
        hub.pull("org/model", progress=False)
    assert "\n" not in str(error.value)


def test_a_full_disk(server, monkeypatch):
    import huggingface_hub.file_download as file_download

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(file_download, "http_get", full)
        with pytest.raises(HubError, match="no space left on the disk while fetching org/model"):
            hub.pull("org/model", progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(hub.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 12_345}))
        with pytest.raises(HubError, match=r"not enough disk space in .*: 1 MB needed, 1 MB missing"):
            hub.pull("org/model", progress=False)
    assert hub.list_models() == []
    hub.pull("org/model", progress=False)

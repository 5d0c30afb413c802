"""The cache folder: names, built-in models through pip, half-written downloads, listing and removing."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from outpace import hub
from outpace.types import HubError

MODEL = b"GGUF" + bytes(range(256)) * 4000


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("OUTPACE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tmp_path / "home"


def make_wheel(folder: Path, model: bytes = MODEL, member: str = "tiny_model/tiny.gguf") -> Path:
    folder.mkdir(exist_ok=True)
    wheel = folder / "outpace_test_tiny_model-1.0-py3-none-any.whl"
    info = "outpace_test_tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, model)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('never run')")
        archive.writestr("../../outside", "x")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: outpace-test-tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def package(monkeypatch, tmp_path, cache) -> hub.Package:
    """A built-in model named "tiny", whose wheel pip finds in a local folder and nowhere else."""
    wheel = make_wheel(tmp_path / "wheels")
    tiny = hub.Package(
        project="outpace-test-tiny-model",
        version="1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        wheel_bytes=wheel.stat().st_size,
        model_bytes=len(MODEL),
    )
    monkeypatch.setitem(hub.BUILT_IN, "tiny", tiny)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return tiny


def left_over(cache: Path) -> list[str]:
    return sorted(p.relative_to(cache).as_posix() for p in cache.rglob("*") if p.is_file() and p.name != "lock")


def test_a_built_in_model_is_pulled_on_demand(package, cache):
    with pytest.raises(HubError, match="run `outpace pull tiny`"):
        hub.resolve("tiny", download=False)
    with pytest.raises(HubError, match="run `outpace pull tiny`"):
        hub.resolve("tiny", offline=True)
    path = hub.resolve("tiny", progress=False)
    assert path.read_bytes() == MODEL
    assert left_over(cache) == ["models/tiny/tiny.gguf", "pulled/tiny.json"]  # neither wheel nor code
    assert hub.list_models() == [hub.ModelInfo("tiny", path, len(MODEL), "gguf")]
    assert hub.resolve("tiny", offline=True) == hub.pull("tiny", offline=True) == path
    hub.remove("tiny")
    assert left_over(cache) == []
    assert hub.list_models() == []
    with pytest.raises(HubError, match="models there: none"):
        hub.remove("tiny")


def test_a_pulled_model_is_not_fetched_again(package, monkeypatch):
    path = hub.pull("tiny", progress=False)
    monkeypatch.setattr(hub, "_download_wheel", None)
    assert hub.pull("tiny") == path
    os.unlink(hub._record_file("tiny"))  # as if killed between the model's last step and its record
    assert hub.pull("tiny") == path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sha256": "0" * 64}, "is not the expected file: its SHA-256 is"),
        ({"model_bytes": 5}, f"has {len(MODEL)} bytes, not 5"),
        ({"member": "tiny_model/other.gguf"}, "is not the expected wheel"),
        ({"version": "2.0"}, "pip could not fetch outpace-test-tiny-model==2.0: .*; check the connection"),
    ],
)
def test_a_wrong_wheel_leaves_nothing(package, monkeypatch, cache, changes, message):
    monkeypatch.setitem(hub.BUILT_IN, "tiny", dataclasses.replace(package, **changes))
    with pytest.raises(HubError, match=message) as error:
        hub.pull("tiny", progress=False)
    assert "\n" not in str(error.value)
    assert left_over(cache) == []


def test_a_damaged_archive(package, monkeypatch, cache, tmp_path):
    wheel = next((tmp_path / "wheels").iterdir())
    data = bytearray(wheel.read_bytes())
    data[200:260] = bytes(60)  # inside the compressed model: its check sum is wrong now
    wheel.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    monkeypatch.setitem(hub.BUILT_IN, "tiny", dataclasses.replace(package, sha256=digest))
    with pytest.raises(HubError, match=r"not the expected wheel|pip could not fetch"):
        hub.pull("tiny", progress=False)
    assert left_over(cache) == []


def test_no_disk_space(package, monkeypatch, cache):
    needed = package.wheel_bytes + package.model_bytes
    with monkeypatch.context() as patch:
        patch.setattr(hub.shutil, "disk_usage", lambda path: type("Usage", (), {"free": needed - 1}))
        with pytest.raises(HubError, match=r"not enough disk space in .*: 2 MB needed, 1 MB missing"):
            hub.pull("tiny", progress=False)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(hub.shutil, "copyfileobj", full)
        with pytest.raises(HubError, match="no space left on the disk while fetching tiny"):
            hub.pull("tiny", progress=False)
    assert left_over(cache) == []
    assert "no space left" in hub._pip_failure("x", "ERROR: Could not install: [Errno 28] No space left on device")
    hub.pull("tiny", progress=False)


def test_no_pip(package, monkeypatch, cache, tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(HubError, match=r"pip is missing for .*: run `.* -m ensurepip`"):
        hub.pull("tiny", progress=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(HubError, match="pip cannot be started: No such file"):
        hub.pull("tiny", progress=False)
    assert left_over(cache) == []


def test_a_cache_that_cannot_be_written(package, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("OUTPACE_HOME", str(tmp_path / "file"))
    with pytest.raises(HubError) as error:
        hub.pull("tiny", progress=False)
    assert "\n" not in str(error.value)
    assert str(tmp_path / "file") in str(error.value)
    monkeypatch.setenv("OUTPACE_HOME", "/proc/nowhere/below")
    with pytest.raises(HubError, match=r"^/proc/nowhere cannot be written .*: set OUTPACE_HOME to a folder of yours$"):
        hub.pull("tiny", progress=False)


def test_a_pull_says_what_it_fetches_and_how_large_it_is(package, capfd, monkeypatch):
    monkeypatch.setitem(hub.BUILT_IN, "tiny", dataclasses.replace(package, wheel_bytes=92_900_000))
    hub.pull("tiny")
    assert tuple(capfd.readouterr()) == ("", "fetching tiny (93 MB)\n")
    hub.pull("tiny")
    hub.remove("tiny")
    capfd.readouterr()
    hub.pull("tiny", progress=False)
    assert tuple(capfd.readouterr()) == ("", "")


def test_a_terminal_sees_how_far_a_pull_is(package, capsys, monkeypatch, tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "a.whl").write_bytes(bytes(250_000))

    class Pip:
        waits = 2

        def communicate(self, timeout):
            self.waits -= 1
            if self.waits >= 0:
                raise hub.subprocess.TimeoutExpired("pip", timeout)
            return "", "done"

    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert hub._wait(Pip(), "tiny", 1_000_000, tmp_path, True) == "done"
    line = "fetching tiny (1 MB)"
    assert capsys.readouterr().err == f"{line}\r{line}  25%\r{line}  25%\n"


def test_what_a_killed_pull_left_is_removed(package, cache, tmp_path):
    """Kills a process in the middle of a pull, while another one is still at work."""
    program = (
        "import sys, time; from outpace import hub\n"
        "with hub._work_folder() as work:\n"
        "    (work / 'half.whl').write_bytes(b'x' * 1000); print(work, flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    start = [sys.executable, "-c", program]
    killed, alive = (subprocess.Popen(start, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2))
    try:
        dead_folder, live_folder = (Path(p.stdout.readline().strip()) for p in (killed, alive))
        assert dead_folder.is_dir()
        assert live_folder.is_dir()
        killed.kill()
        killed.wait()
        assert hub.pull("tiny", progress=False).read_bytes() == MODEL
        assert not dead_folder.exists()
        assert (live_folder / "half.whl").exists()
    finally:
        alive.kill()
        alive.wait()
        for process in (killed, alive):
            process.stdout.close()


def test_two_processes_pull_at_once(package, cache):
    fields = json.dumps(dataclasses.asdict(package))
    program = (
        "import json; from outpace import hub\n"
        f"hub.BUILT_IN['tiny'] = hub.Package(**json.loads({fields!r}))\n"
        "print(hub.pull('tiny', progress=False))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = {p.communicate()[0].strip() for p in running}
    assert [p.returncode for p in running] == [0, 0]
    assert answers == {str(hub.resolve("tiny"))}
    assert left_over(cache) == ["models/tiny/tiny.gguf", "pulled/tiny.json"]


def test_local_paths(cache, tmp_path, monkeypatch):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "m.bin").write_bytes(b"pickle")
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert hub.resolve(tmp_path / "m.gguf") == tmp_path / "m.gguf"
    assert hub.resolve(str(tmp_path / "org")) == tmp_path / "org"
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("org/model") == Path("org/model")
    assert hub.resolve("m.gguf") == Path("m.gguf")
    with pytest.raises(HubError, match=r"is not a model: expected a folder or a \.gguf file"):
        hub.resolve("m.bin")
    for missing in ("./nothing", str(tmp_path / "nothing.gguf"), Path("nothing")):
        with pytest.raises(HubError, match="no model at"):
            hub.resolve(missing)


BAD_NAMES = [
    "",
    "nothing",
    "a/b/c",
    "../x",
    "org/..",
    "org/a..b",
    "org/--x",
    "/etc/passwd",
    "org/m@../x",
    "org/m:../x.gguf",
]
BAD_NAMES += [
    "org/m@",
    "org/m:",
    "org/m\n",
    "org/m\0",
    "org\\m",
    "órg/m",
    "https://host/org/m",
    "org/m:a:b",
    "o/" + "m" * 400,
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_are_checked_before_anything_else(name, cache):
    for verb in (hub.pull, hub.remove):
        with pytest.raises(HubError, match="is no model: expected a folder"):
            verb(name)
    assert not cache.exists()


def test_damaged_records_count_as_absent(package, cache):
    path = hub.pull("tiny", progress=False)
    record = json.loads(hub._record_file("tiny").read_text())
    outside = {"path": "../x", "root": "../../x", "files": {"/etc/passwd": ""}}
    for damage in ("", "[]", "{", "[" * 100_000, *(json.dumps({**record, k: v}) for k, v in outside.items())):
        hub._record_file("tiny").write_text(damage)
        assert hub.list_models() == []
        with pytest.raises(HubError):
            hub.remove("tiny")
    assert hub.resolve("tiny") == path  # the model itself is whole
    path.unlink()
    assert hub.list_models() == []
    assert hub.resolve("tiny", progress=False).read_bytes() == MODEL


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("OUTPACE_HOME", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert hub.home() == tmp_path / "a"
    monkeypatch.delenv("OUTPACE_HOME")
    assert hub.home() == tmp_path / "b" / "outpace"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert hub.home() == tmp_path / "c" / ".cache" / "outpace"

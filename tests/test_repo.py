"""The habits of this repository: imports go one way, modules and public functions say what they do, nothing foreign."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "outpace"
MODULES = sorted(SOURCE.rglob("*.py"))

# A part may import parts of the rows above its own, and itself. The parts of one row do not know each other.
LAYERS = (
    ("types",),
    ("json_file",),
    ("config", "text", "sampling", "verify", "evidence", "budget", "hub"),
    ("weights", "cache"),
    ("models",),
    ("heads",),
    ("backends",),
    ("slots", "costs"),
    ("drafters", "controller"),
    ("proposing",),
    ("decode",),
    ("engine", "self_draft"),
    ("opening",),
    ("api", "speculator"),
    ("calibrate",),
    ("bench", "server"),
    ("train",),
    ("cli",),
)
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
TEST_ONLY = {"speculators", "torch", "transformers", "gguf", "safetensors", "scipy", "hypothesis", "pytest"}


def part_of(module: str) -> str:
    """ "outpace.models.names" -> "models"; config_hf and its like belong to config; "" for the package itself."""
    name = module.partition(".")[2].partition(".")[0]
    return "config" if name.startswith("config_") else name


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> list[tuple[str, int]]:
    """Absolute names of all modules that a file imports, functions' own imports included, with their lines."""
    package = path.relative_to(SOURCE.parent).parent.parts
    found: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            # `from . import verify` names a module, `from .types import Draft` something in one.
            found += [
                (f"{module}.{a.name}" if is_module(f"{module}.{a.name}") else module, node.lineno) for a in node.names
            ]
    return found


def is_module(name: str) -> bool:
    path = SOURCE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or path.with_suffix(".pyi").is_file() or (path / "__init__.py").is_file()


def wrong_arrows(path: Path) -> list[str]:
    """The file's imports that go against the order."""
    own = part_of(module_name(path))
    if own in ("", "__main__"):  # the package's front door and `python -m outpace`
        return []
    wrong = []
    for name, line in imports(path):
        other = part_of(name) if name.split(".")[0] == "outpace" else own
        if other in ("", own) or (other == "_native" and own in ("backends", "sampling", "text", "weights", "bench")):
            continue
        if other not in RANK or RANK[other] >= RANK[own]:
            wrong.append(f"{path.name}:{line}: {own} imports {name}")
    return wrong


def test_every_part_has_its_place() -> None:
    parts = {part_of(module_name(path)) for path in MODULES} - {"", "__main__"}
    assert parts == set(RANK)


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_go_one_way(path: Path) -> None:
    assert wrong_arrows(path) == []


def test_a_wrong_arrow_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(f"{__name__}.SOURCE", tmp_path / "outpace")
    for name, content in {
        "types.py": "def f():\n    from .decode import Decoder\n",
        "decode.py": "from . import verify, api\nimport outpace.engine\nimport json\nfrom outpace.types import Draft\n",
        "verify.py": "from .types import Draft\n",
        "api.py": "",
        "models/__init__.py": "",
        "models/names.py": "from ..backends.base import Rows\nfrom ..config import ModelConfig\nfrom . import other\n",
    }.items():
        (tmp_path / "outpace" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "outpace" / name).write_text(content)
    found = {path: wrong_arrows(tmp_path / "outpace" / path) for path in ("types.py", "decode.py", "verify.py")}
    assert found == {
        "types.py": ["types.py:2: types imports outpace.decode"],
        "decode.py": ["decode.py:1: decode imports outpace.api", "decode.py:2: decode imports outpace.engine"],
        "verify.py": [],
    }
    assert wrong_arrows(tmp_path / "outpace" / "models" / "names.py") == [
        "names.py:1: models imports outpace.backends.base"
    ]


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_the_package_needs_nothing_that_only_tests_have(path: Path) -> None:
    allowed = {"torch"} if path.name == "torch_or_say.py" else set()  # of the extra `train`, missed in one clear line
    assert ({name.split(".")[0] for name, _ in imports(path)} & TEST_ONLY) <= allowed


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_public_things_say_what_they_do(path: Path) -> None:
    """Modules, public classes and functions. Methods whose name says it all may go without."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    silent = [] if ast.get_docstring(tree) else ["the module"]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            silent += [] if ast.get_docstring(node) else [node.name]
    assert silent == []


def test_nothing_here_names_a_machine_or_a_package_registry() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    hosts = ("py" + "pi.org", "python" + "hosted.org", "conda" + ".anaconda.org", "/wo" + "rk/", "/ho" + "me/")
    pattern = re.compile("|".join(map(re.escape, hosts)))
    wrong = []
    for name in listed.stdout.splitlines():
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        wrong += [f"{name}:{i}: {line.strip()}" for i, line in enumerate(text.splitlines(), 1) if pattern.search(line)]
    assert wrong == []


def test_the_versions_agree() -> None:
    import outpace

    assert f'\nversion = "{outpace.__version__}"\n' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## [Unreleased]" in changes


def test_the_lock_covers_what_the_project_asks_for() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    asked = [*project["build-system"]["requires"], *project["project"]["dependencies"], *extras["test"], *extras["dev"]]
    names = {re.split(r"[\[<>=]", text)[0] for text in asked} - {"outpace"}
    lines = (ROOT / "requirements-dev.lock").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0] for line in lines if "==" in line}

    def plain(found: set[str]) -> set[str]:
        return {name.lower().replace("_", "-") for name in found}

    assert plain(names) <= plain(pinned)


def test_the_page_of_speeds_says_what_its_figures_say() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "speed_table.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

"""The native core's tests once more, built with AddressSanitizer and UndefinedBehaviorSanitizer.

A build of its own (a minute or two), run in a subprocess that loads the sanitizer before Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = (
    "product or oracle or odd_shapes or far_positions or company or chunks or history or refused or slots or nan "
    "or damaged or any_form or cache or extreme"
)


def runtime(compiler: str, name: str) -> str | None:
    """The compiler's sanitizer library, None where it has none (it then answers with the bare name)."""
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return found if os.path.isabs(found) and Path(found).exists() else None


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_native_core_under_sanitizers(tmp_path):
    compiler, cmake = shutil.which("g++"), shutil.which("cmake", path=search_path())
    if compiler is None or cmake is None:
        pytest.skip("needs g++ and cmake")
    libraries = [runtime(compiler, name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    if None in libraries:
        pytest.skip("the compiler has no sanitizer runtime (Debian, Ubuntu: apt install libasan8 libubsan1)")
    package = tmp_path / "package" / "outpace"
    shutil.copytree(ROOT / "src" / "outpace", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    build = tmp_path / "build"
    env = os.environ | {"PATH": search_path(), "CXX": compiler}
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=search_path()) else []
    for command in (
        [cmake, "-S", ROOT, "-B", build, *generator, "-DOUTPACE_SANITIZE=ON", f"-DPython_EXECUTABLE={sys.executable}"],
        [cmake, "--build", build, "--parallel", "2"],
    ):
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [module] = build.glob("_native*.so")
    shutil.copy(module, package)
    env |= {
        "PYTHONPATH": str(package.parent),
        "LD_PRELOAD": " ".join(filter(None, libraries)),
        # Python keeps memory until it exits, which is no leak of ours.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", TESTS]
    files = [str(ROOT / "tests" / name) for name in ("test_native.py", "test_native_kinds.py")]
    done = subprocess.run([*command, *files], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
    assert "runtime error" not in done.stderr


def search_path() -> str:
    """PATH, with the folder of this Python first: cmake and ninja may be installed beside it."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])

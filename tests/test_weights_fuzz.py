"""Damaged files, by the hundred: each loads to well-shaped tensors or raises ModelError. See fuzz_weights.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import outpace

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the memory guard reads /proc")


@pytest.mark.parametrize(("kind", "cases"), [("gguf", 400), ("safetensors", 400), ("index", 250)])
def test_mutants_load_or_are_refused(tmp_path, kind, cases):
    environment = os.environ | {
        "PYTHONPATH": str(Path(outpace.__file__).parents[1]),
        "OPENBLAS_NUM_THREADS": "1",  # threads reserve address space, which the guard counts
    }
    script = Path(__file__).with_name("fuzz_weights.py")
    done = subprocess.run(
        [sys.executable, str(script), kind, str(tmp_path), str(cases)],
        capture_output=True, text=True, env=environment, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    loaded, refused = map(int, done.stdout.split())
    assert loaded + refused == cases
    assert refused > cases // 3  # the mutations really reach the structure ...
    assert loaded > 0  # ... and some only change values

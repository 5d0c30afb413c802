"""The check of the native core that needs no Python (csrc/check/): it builds, passes, and no kernel file leaves code
compiled for one processor where the linker could give it to others."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from test_native_sanitizers import search_path

SCRIPT = Path(__file__).parents[1] / "scripts" / "check_kernels.sh"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_family_without_python():
    if shutil.which("cmake", path=search_path()) is None or shutil.which("c++") is None:
        pytest.skip("needs cmake and a C++ compiler")
    done = subprocess.run([SCRIPT], env=os.environ | {"PATH": search_path()}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.endswith("the same bits everywhere\n")

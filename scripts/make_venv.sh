#!/usr/bin/env bash
# Makes the virtual environment $1, after checking that everything a build takes is there. PYTHON chooses the Python.
set -euo pipefail

fail() {
    echo "outpace: $1" >&2
    exit 1
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

python=
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if new_enough "$candidate"; then python=$candidate && break; fi
done
[ -n "$python" ] || fail "needs Python 3.11 or newer: apt-get install python3 (or set PYTHON=/path/to/python3.11)"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$python" -c 'import venv, ensurepip' 2>/dev/null || fail "needs Python's venv module: apt-get install python$version-venv"
"$python" -c 'import os, sysconfig; open(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null ||
    fail "needs Python's headers: apt-get install python$version-dev"
command -v "${CXX:-g++}" >/dev/null || fail "needs a C++ compiler: apt-get install g++"

if [ ! -x "$1/bin/python" ] || ! new_enough "$1/bin/python"; then
    echo "making $1 with $("$python" --version)"
    "$python" -m venv --clear "$1"
fi

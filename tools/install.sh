#!/bin/sh
# Makes $VENV and installs tilewright into it, editable, with its development extras. Where there is no NVIDIA GPU torch
# is pinned to a release whose CPU build the index offers; set TORCH_INDEX to a wheel index to choose another source.
set -e
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "tilewright needs Python 3.11 or newer, found $("$PYTHON" --version 2>&1); set PYTHON=python3.x" >&2
    exit 1
}
"$PYTHON" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then
    echo "NVIDIA GPU found: installing torch with CUDA" >&2
    pip "torch>=2.11" triton
else
    echo "no NVIDIA GPU: installing the CPU build of torch" >&2
    pip ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==2.13.0"
    pip triton
fi
pip --editable ".[dev]"

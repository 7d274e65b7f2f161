#!/usr/bin/env bash
# Build the wheel for Pyodide into relay/_built, with the npm package `pyodide`. Usage: tools/pyodide.sh [VENV]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(realpath "${1:-.venv}")
. tools/node-path.sh "$venv"
cd wasm/pyodide
[ node_modules/.package-lock.json -nt package-lock.json ] || npm ci --no-audit --no-fund --silent
exec "$venv/bin/python" build.py

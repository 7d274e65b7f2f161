#!/usr/bin/env bash
# Fetch the npm package `pyodide`, in which the wheel is tested, and build the wheel. Usage: tools/pyodide.sh [VENV]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(realpath "${1:-.venv}")
. tools/node-path.sh "$venv"
cd wasm/pyodide
[ node_modules/.package-lock.json -nt package-lock.json ] || npm ci --no-audit --no-fund --silent
exec "$venv/bin/python" build.py

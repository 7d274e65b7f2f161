#!/usr/bin/env bash
# Fetch ggml's own libraries, which the kernel's tests and benchmarks are held against. Usage: tools/oracles.sh [VENV]
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/node-path.sh "${1:-.venv}"
cd tests/oracles
[ node_modules/.package-lock.json -nt package-lock.json ] || npm ci --no-audit --no-fund --silent

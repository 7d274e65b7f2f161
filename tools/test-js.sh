#!/usr/bin/env bash
# Run the page's unit tests with node --test. Usage: tools/test-js.sh [VENV]
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/node-path.sh "${1:-.venv}"
exec node --test --test-timeout=120000 --test-reporter=spec node-web/test/*.test.js

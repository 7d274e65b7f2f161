#!/usr/bin/env bash
# Type-check the page's JavaScript (JSDoc types, tsc --checkJs --strict). Usage: tools/check-js.sh [VENV]
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/node-path.sh "${1:-.venv}"
cd node-web
[ node_modules/.package-lock.json -nt package-lock.json ] || npm ci --no-audit --no-fund --silent
exec node node_modules/typescript/bin/tsc --project tsconfig.json

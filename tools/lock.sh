#!/usr/bin/env bash
# Write constraints.txt: the versions that a fresh environment takes today, for everybody until the next run.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
"${PYTHON:-.venv/bin/python}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check editables hatchling ziglang==0.17.1
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-build-isolation -e '.[dev]'
{
  echo "# Written by tools/lock.sh; used by tools/setup.sh."
  "$venv/bin/python" -m pip list --format=freeze --exclude-editable --exclude pip --exclude expertswarm
} >constraints.txt

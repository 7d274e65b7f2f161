#!/usr/bin/env bash
# Make .venv ready: find a Python that is new enough, install the pinned packages, compile kernel and device.
# Says nothing and takes no time when everything is up to date. Usage: tools/setup.sh [VENV]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}

find_python() {
  local candidate
  for candidate in python3.13 python3.12 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python /usr/local/bin/python3; do
    candidate=$(command -v "$candidate" 2>/dev/null) || continue
    if "$candidate" -c 'import sys, venv, ensurepip; raise SystemExit(sys.version_info < (3, 12))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "setup: no Python >= 3.12 with venv found (looked in PATH and ~/.pyenv/versions)." >&2
  echo "setup: on Debian 13: apt-get install python3-venv; elsewhere: pyenv install 3.13" >&2
  exit 1
}

stamp=$venv/.setup-stamp
wanted=$(cat pyproject.toml constraints.txt tools/setup.sh | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  [ -x "$venv/bin/python" ] || { python=$(find_python); echo "setup: $venv with $python"; "$python" -m venv "$venv"; }
  echo "setup: installing packages (the first time takes some minutes)"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt editables hatchling ziglang
  # No build isolation: the compiler is large and already here.
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
  echo "$wanted" >"$stamp"
fi
"$venv/bin/python" hatch_build.py

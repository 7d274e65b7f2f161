#!/usr/bin/env bash
# Runs llama.cpp's own server tests against the backbone's port. For development; needs git and the network.
#
#   tools/llama-server-tests.sh URL [pytest arguments]      e.g. http://127.0.0.1:8080 -k "tokenize or basic"
#
# The tests start a server of their own; here `start` only looks for ours. Expected failures, with reasons, are
# in backbone/gateway/DIFFERENCES.md; tests of other models' texts fail on any model but theirs.
set -euo pipefail
url=${1:?"usage: tools/llama-server-tests.sh URL [pytest arguments]"}; shift
python=${PYTHON:-python3}
commit=${LLAMA_CPP_COMMIT:-master}
folder=${XDG_CACHE_HOME:-$HOME/.cache}/expertswarm/llama-server-tests
if [ ! -d "$folder/.git" ]; then
  git clone --quiet --depth 1 --filter=blob:none --sparse --branch "$commit" \
    https://github.com/ggml-org/llama.cpp "$folder"
  git -C "$folder" sparse-checkout set tools/server/tests
fi
cd "$folder/tools/server/tests"
cat > conftest.py <<PY
import os
import pytest
from utils import ServerProcess

def start(self, timeout_seconds=10):
    host, port = os.environ["DOOR"].removeprefix("http://").rstrip("/").rsplit(":", 1)
    self.server_host, self.server_port = host, int(port)
    assert self.make_request("GET", "/health").status_code == 200

ServerProcess.start = start
ServerProcess.stop = lambda self: None

@pytest.fixture(autouse=True)
def stop_server_after_each_test():
    yield
PY
DOOR=$url exec "$python" -m pytest -q unit "$@"

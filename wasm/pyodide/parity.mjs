// Run a Python script inside Pyodide, with the wheel installed: node parity.mjs PYODIDE WHEEL SCRIPT DATA
// The folder DATA is seen as /data; what the script leaves in `result` is printed as JSON.
import { readFileSync, readdirSync } from 'node:fs';
import { join, resolve } from 'node:path';
import { pathToFileURL } from 'node:url';

const [pyodideFolder, wheel, script, data] = process.argv.slice(2).map((path) => resolve(path));
const { loadPyodide } = await import(pathToFileURL(join(pyodideFolder, 'pyodide.mjs')).href);
const python = await loadPyodide({ indexURL: pyodideFolder });
python.unpackArchive(new Uint8Array(readFileSync(wheel)).buffer, 'wheel');
python.FS.mkdir('/data');
for (const name of readdirSync(data)) python.FS.writeFile(`/data/${name}`, readFileSync(join(data, name)));
python.runPython(readFileSync(script, 'utf8'));
console.log(python.runPython('import json; json.dumps(result)'));

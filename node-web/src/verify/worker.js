/**
 * Pyodide in a worker: load it, unpack the wheel, check one record. Says each step as it begins.
 *
 * Whatever Pyodide may do, the page stays responsive, and closing the worker frees all of its memory.
 */

/** @typedef {{step: 'python'|'kernel'|'check'} | {report: import('./words.js').Report} | {error: string}} FromWorker */

export {}; // a module, as its page starts it

/** @param {FromWorker} message */
const tell = (message) => self.postMessage(message);

self.onmessage = async ({ data: { pyodide, wheel, record } }) => {
  try {
    tell({ step: 'python' });
    const base = new URL(pyodide, self.location.href).href;
    const { loadPyodide } = await import(`${base}pyodide.mjs`);
    const python = await loadPyodide({ indexURL: base });
    tell({ step: 'kernel' });
    const reply = await fetch(new URL(wheel, self.location.href));
    if (!reply.ok) throw new Error(`the wheel cannot be fetched: HTTP ${reply.status}`);
    python.unpackArchive(await reply.arrayBuffer(), 'wheel');
    python.FS.writeFile('/record', new Uint8Array(record));
    tell({ step: 'check' });
    const report = python.runPython(`
import json
from expertswarm_verify import Kernel, check
kernel = Kernel()
for number in range(kernel.num_known_answers):
    kernel.known_answer(number, 2)
with open("/record", "rb") as file:
    report = check(file.read(), kernel)
json.dumps(report)
`);
    tell({ report: JSON.parse(report) });
  } catch (error) {
    tell({ error: error instanceof Error ? error.message : String(error) });
  }
};

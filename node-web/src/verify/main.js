/** The page that verifies a recorded call: a file in, a verdict out. Loads Python only when asked to. */

import { messageOf } from '../errors.js';
import { element, make, say } from '../ui/dom.js';
import { STEPS, facts, verdict } from './words.js';

/** @typedef {import('./words.js').Report} Report */
/** @typedef {{pyodide: string, version: string, wheel: string|null, missing: string[]}} Setup */

const MOST_BYTES = 300 << 20; // a backbone records less than that
const DEADLINE_MS = 180_000; // loading and computing; a slow line may need the most of it

const form = /** @type {HTMLFormElement} */ (element('form'));
const file = /** @type {HTMLInputElement} */ (element('file'));
const start = /** @type {HTMLButtonElement} */ (element('start'));
/** @type {Setup|null} */
let setup = null;

/** @param {string} text */
function notice(text) {
  say(element('notice'), text);
  element('notice').hidden = !text;
}

/** @param {'idle'|'running'|'done'} state */
function state(state) {
  document.body.dataset.state = state;
  start.disabled = state === 'running' || !setup || setup.missing.length > 0;
}

async function prepare() {
  const reply = await fetch('verify/setup.json');
  if (!reply.ok) throw new Error(`HTTP ${reply.status}`);
  setup = /** @type {Setup} */ (await reply.json());
  const from = new URL(setup.pyodide, location.href);
  const where = from.origin === location.origin ? 'this relay' : from.href;
  say(element('source'), `This loads Python (Pyodide ${setup.version}, about 6 MB) from ${where}${from.origin === location.origin ? '' : ', whose owner then sees your address and must be trusted with the result'}.`);
  if (setup.missing.length) notice(`This relay cannot verify yet. It lacks ${setup.missing.join(', and ')}.`);
}

/** Show how far it has come: steps before `current` are done. @param {string} current @param {boolean} [failed] */
function showSteps(current, failed = false) {
  const list = element('steps');
  list.hidden = false;
  const at = current === 'end' ? STEPS.length : STEPS.findIndex(([step]) => step === current);
  list.replaceChildren(...STEPS.map(([, text], i) => make('li', text, i < at ? 'done' : i > at ? '' : failed ? 'failed' : 'running')));
}

/** @param {Report} report */
function show(report) {
  const found = verdict(report);
  element('verdict').hidden = false;
  element('verdict').dataset.verdict = found.verdict;
  say(element('verdict-title'), found.title);
  say(element('verdict-detail'), found.detail);
  element('facts').replaceChildren(...facts(report).map(([name, value, className]) => {
    const row = make('div');
    row.append(make('dt', name), make('dd', value, className));
    return row;
  }));
  const table = make('table');
  const head = make('tr');
  head.append(...['row', 'channel', 'answered', 'computed'].map((name) => make('th', name)));
  table.append(head, ...report.differences.map((numbers) => {
    const row = make('tr');
    row.append(...numbers.map((number) => make('td', String(number))));
    return row;
  }));
  element('differences').replaceChildren(table);
  element('differences').hidden = report.differences.length === 0;
  element('verdict').scrollIntoView({ block: 'nearest' });
}

/** Check one record in a worker made for it. @param {ArrayBuffer} record @param {Setup} using @returns {Promise<Report>} */
async function check(record, using) {
  const worker = new Worker(new URL('worker.js', import.meta.url), { type: 'module' });
  let step = 'python';
  /** @type {ReturnType<typeof setTimeout>|undefined} */
  let late;
  try {
    showSteps(step);
    const report = await new Promise((resolve, reject) => {
      late = setTimeout(() => reject(new Error(`no result within ${DEADLINE_MS / 1000} s`)), DEADLINE_MS);
      worker.onmessage = ({ data }) => {
        if (data.step) showSteps(step = data.step);
        else if (data.report) resolve(data.report);
        else reject(new Error(data.error));
      };
      worker.onerror = (event) => reject(new Error(event.message || 'the worker could not start'));
      worker.postMessage({ pyodide: using.pyodide, wheel: using.wheel, record }, [record]);
    });
    showSteps('end');
    return report;
  } catch (error) {
    showSteps(step, true);
    throw error;
  } finally {
    clearTimeout(late);
    worker.terminate();
  }
}

form.addEventListener('submit', async (event) => {
  event.preventDefault();
  const chosen = file.files?.[0];
  if (!chosen || !setup) return;
  notice('');
  element('verdict').hidden = true;
  if (chosen.size > MOST_BYTES) return notice('This file is too large to be a recorded call.');
  state('running');
  try {
    show(await check(await chosen.arrayBuffer(), setup));
  } catch (error) {
    notice(`It could not be computed: ${messageOf(error)}`);
  }
  state('done');
});

prepare().catch((error) => notice(`The relay does not say where Python is: ${messageOf(error)}`)).finally(() => state('idle'));

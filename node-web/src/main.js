/** The page's entry: starts the worker, keeps the facts, has the view show them. It knows no protocol. */

import { lookAtDevice, MB, workersFor } from './device.js';
import { holdFor, pressed } from './holds.js';
import { deviceNotes, identity, meetBackbone, recall, remember, tabNotes } from './identity.js';
import { BEAT_MS, Runs, SETTLED_MS } from './runs.js';
import { SurroundingsWatch } from './surroundings.js';
import { RtcHost } from './transports/webrtc.js';
import { element } from './ui/dom.js';
import { PledgePanel } from './ui/pledge.js';
import { View } from './ui/view.js';

/** @typedef {import('./client.js').Status} Status */

const ASK_RELAY_MS = 5000;
const TOTAL = 'total';
const METERED = 'metered-agreed';
const TOO_OLD = 'This browser cannot compute: it has no WebAssembly with SIMD, or it is switched off. A current Chrome, Edge, Firefox or Safari (iOS 16.4 or later) can.';
const STUCK = 'The page’s worker does not start. Reload the page; if that does not help, use a current Chrome, Edge, Firefox or Safari (iOS 16.4 or later).';
const CRASHED = 'Last time this page ended while it worked, perhaps for lack of memory. It lends less now.';
const CRASHED_OFTEN = 'This page ended more than once while it worked, perhaps for lack of memory. It begins again only when you press Start; less is proposed.';
const FAILED = 'The page’s worker ended, perhaps for lack of memory. You may start again; less is proposed.';
/** Whoever starts a browser for this page alone agrees by its user agent (`--user-agent`); an address cannot. */
const AGREED_AGENT = 'swarm-agreed';
const ASKED = 'The address you opened asks this device to begin by itself. It does once you have pressed Start here.';

/** What the address asks for behind #: `auto`, `key=` fingerprint of the only backbone to work for. */
const fragment = new URLSearchParams(location.hash.slice(1));

const device = lookAtDevice();
const rtc = new RtcHost();
const run = crypto.getRandomValues(new Uint32Array(2)).join('-');
const runs = new Runs(deviceNotes, tabNotes, run);
const view = new View(device);
const pledge = new PledgePanel(device, render);
/** @type {Worker|null} */
let worker = null;
/** @type {import('./holds.js').Wishes} */
let wishes = { paused: false, lowBattery: false, metered: tabNotes.get(METERED) === '1' };
/** What this page did before the present start. @type {import('./ui/view.js').Work} */
let earlier = { calls: 0, rows: 0, tokens: 0 };
/** @type {(() => void)|null} */
let unlock = null;
/** @type {ReturnType<typeof setTimeout>|undefined} */
let settling;

const surroundings = new SurroundingsWatch(() => {
  if (surroundings.now.battery?.charging) wishes = { ...wishes, lowBattery: false };
  tell({ type: 'power', power: surroundings.power() });
  reconsider();
});

/** @type {import('./ui/view.js').Facts} */
const facts = {
  device,
  status: null,
  running: false,
  failed: false,
  hold: null,
  around: surroundings.now,
  lane: null,
  offer: null,
  before: readTotal(),
  keptBytes: 0,
  goneBytes: 0,
  deleting: false,
  asking: false,
  leaving: false,
  chosenMb: pledge.chosenMb,
  notice: !device.workers ? TOO_OLD : device.inApp === null ? '' : `This is the browser inside ${device.inApp}, which may stop the page at any time. Open the address in Safari, Chrome or Firefox instead.`,
};

function render() {
  facts.chosenMb = pledge.chosenMb;
  view.show(facts);
}

/** @param {object} message */
function tell(message) {
  worker?.postMessage(message);
}

/** Pause or go on, as owner, battery and line want it. */
function reconsider() {
  const hold = facts.running ? holdFor(surroundings.now, wishes, facts.hold) : null;
  if (hold !== facts.hold) tell({ type: 'pause', paused: hold !== null });
  facts.hold = hold;
  if (!surroundings.now.metered) facts.asking = false;
  render();
}

// --- the worker

/** @param {(opened: Worker) => void} onFailed @returns {Worker} */
function openWorker(onFailed) {
  const opened = new Worker(new URL('worker.js', import.meta.url), { type: 'module' });
  opened.onmessage = ({ data }) => {
    if (data.type === 'rtc') rtc.answer(data.offer);
    else if (data.type === 'kept') heardKept(opened, data);
    else if (opened === worker) heard(data.status);
  };
  opened.onerror = (event) => {
    event.preventDefault();
    console.warn(`worker: ${event.message}`);
    opened.terminate();
    onFailed(opened);
  };
  return opened;
}

function stopWorker() {
  worker?.terminate();
  worker = null;
  rtc.close();
  clearTimeout(settling);
  unlock?.();
  unlock = null;
  surroundings.keepAwake(false);
  Object.assign(facts, { running: false, hold: null, leaving: false, lane: null, deleting: false });
  wishes = { ...wishes, paused: false, lowBattery: false };
}

/** @param {boolean} mayCost  the owner said so */
function start(mayCost) {
  if (worker !== null || !device.workers) return;
  if (surroundings.now.metered && !wishes.metered && !mayCost) {
    facts.asking = true;
    render();
    return;
  }
  if (mayCost) agreeToCost();
  pledge.keep();
  mark();
  worker = openWorker(() => {
    const began = facts.status !== null;
    fold();
    runs.failed();
    pledge.lower();
    stopWorker();
    Object.assign(facts, { status: null, failed: true, notice: began ? FAILED : STUCK });
    render();
  });
  facts.hold = holdFor(surroundings.now, wishes, null);
  Object.assign(facts, { status: null, running: true, failed: false, asking: false, goneBytes: 0 });
  const settings = {
    page: new URL('./', location.href).href,
    memoryBytes: pledge.chosenMb * MB,
    name: nameOf(),
    identity: identity(),
    power: surroundings.power(),
    pinned: fragment.get('key'),
    rtc: rtc.able,
    workers: askedWorkers() ?? workersFor(device),
    paused: facts.hold !== null,
    gpu: device.webgpu && new URLSearchParams(location.search).get('gpu') === '1',
  };
  tell({ type: 'start', settings });
  surroundings.keepAwake(true);
  navigator.storage?.persist?.().catch(() => false); // a wish; browsers decide by themselves
  render();
}

function agreeToCost() {
  wishes = { ...wishes, metered: true };
  tabNotes.set(METERED, '1');
}

/** Note that this page is at work, so that the next one knows if it crashed. */
function mark() {
  runs.begin(Date.now());
  settling = setTimeout(() => runs.settled(), SETTLED_MS);
  if (unlock === null) navigator.locks?.request(`run-${run}`, () => new Promise((resolve) => { unlock = () => resolve(undefined); })).catch(() => undefined);
}

/** `?workers=3` in the address overrides what we would choose. @returns {number|null} */
function askedWorkers() {
  const number = Number(new URLSearchParams(location.search).get('workers'));
  return Number.isInteger(number) && number >= 1 && number <= 64 ? number : null;
}

/** @param {Status} latest */
function heard(latest) {
  const paired = facts.status?.paired ?? false;
  const { calls, rows, tokens } = earlier;
  const status = { ...latest, calls: calls + latest.calls, rows: rows + latest.rows, tokens: tokens + latest.tokens };
  facts.status = status;
  if (!facts.deleting) facts.keptBytes = status.store === 'memory' ? 0 : status.keptBytes;
  if (!status.paired) facts.lane = null;
  else if (!paired) askRelay();
  if (status.seal === 'sealed' && status.backbone !== null) warnOfStranger(status.backbone);
  if (status.state === 'CLOSED') {
    fold();
    runs.ended(status.reason === 'left');
    stopWorker(); // memory given to WebAssembly comes back only so
    askStore('kept');
  }
  render();
}

/** A key that was never seen here, where another one was: who pinned none should know. @param {string} backbone */
function warnOfStranger(backbone) {
  const known = meetBackbone(backbone);
  if (known !== null && !fragment.has('key')) {
    facts.notice = `The model’s computer shows another key (${backbone}) than before (${known}). If nobody told you of a change, stop and ask whoever gave you this address.`;
  }
}

// --- what is kept

/** @param {Worker} from @param {{keptBytes: number, goneBytes: number}} said */
function heardKept(from, { keptBytes, goneBytes }) {
  facts.keptBytes = keptBytes;
  facts.goneBytes += goneBytes;
  facts.deleting = false;
  if (from !== worker) from.terminate();
  render();
}

/** Look at, or delete, what this page keeps; by the worker that runs or by one for this. @param {'kept'|'forget'} type */
function askStore(type) {
  const asked = worker ?? openWorker(() => {
    facts.deleting = false;
    render();
  });
  asked.postMessage({ type });
}

// --- totals

/** @returns {import('./ui/view.js').Work} */
function readTotal() {
  const [calls = 0, rows = 0, tokens = 0] = (recall(TOTAL) ?? '').split(' ').map(Number).filter(Number.isFinite);
  return { calls, rows, tokens };
}

/** A run is over: what it did is added to what the next one does. */
function fold() {
  keepTotal();
  const { calls, rows, tokens } = facts.status ?? earlier;
  earlier = { calls, rows, tokens };
}

function keepTotal() {
  const { before, status } = facts;
  if (status === null) return;
  remember(TOTAL, [before.calls + status.calls, before.rows + status.rows, before.tokens + status.tokens].join(' '));
}

/** How others see this device: its kind, nothing personal. */
function nameOf() {
  const agent = navigator.userAgent;
  const kind = device.ios ? 'iPhone or iPad' : /Android/.test(agent) ? 'Android' : /Mac/.test(agent) ? 'Mac' : /Windows/.test(agent) ? 'Windows' : 'Linux';
  const browser = /Firefox|FxiOS/.test(agent) ? 'Firefox' : /Edg/.test(agent) ? 'Edge' : /Chrome|CriOS/.test(agent) ? 'Chrome' : 'Safari';
  return `${browser}, ${kind}`;
}

// --- what people press

element('pledge').addEventListener('submit', (event) => {
  event.preventDefault();
  if (device.inApp === null && device.workers) facts.notice = '';
  runs.agree();
  start(false);
});
element('ask-yes').addEventListener('click', () => {
  runs.agree();
  start(true);
});
element('ask-no').addEventListener('click', () => {
  facts.asking = false;
  render();
});
element('pause').addEventListener('click', () => {
  wishes = pressed(facts.hold, wishes);
  if (wishes.metered) agreeToCost();
  reconsider();
});
element('leave').addEventListener('click', () => {
  if (facts.leaving) return;
  facts.leaving = true;
  tell({ type: 'leave' });
  render();
});
element('forget').addEventListener('click', () => {
  if (facts.deleting) return;
  Object.assign(facts, { deleting: true, goneBytes: 0 });
  askStore('forget');
  render();
});

// --- the browser's own signs that the page stops or goes on; the worker checks the clock as well

addEventListener('pagehide', () => {
  keepTotal();
  if (worker !== null) runs.left();
  tell({ type: 'sleep', reason: 'page hidden' });
});
document.addEventListener('freeze', () => {
  if (worker !== null) runs.left(); // a browser may drop a frozen page, which is no crash
  tell({ type: 'sleep', reason: 'page frozen' });
});
for (const [target, sign] of /** @type {[EventTarget, string][]} */ ([[window, 'pageshow'], [window, 'online'], [document, 'resume']])) {
  target.addEventListener(sign, () => {
    if (worker !== null) runs.begin(Date.now());
    tell({ type: 'look' });
  });
}
// Wi-Fi to cellular: the old socket may look open for minutes. Not every browser tells by the second sign.
addEventListener('online', () => tell({ type: 'network' }));
/** @type {any} */ (navigator).connection?.addEventListener?.('change', () => tell({ type: 'network' }));
document.addEventListener('visibilitychange', () => {
  if (document.visibilityState !== 'visible') return;
  tell({ type: 'look' });
  askRelay();
  if (worker !== null) surroundings.keepAwake(true);
});

/** Ask the relay what it and the backbone say of us; only while somebody looks. */
async function askRelay() {
  if (document.visibilityState !== 'visible') return;
  if (facts.running) facts.lane = facts.status?.paired ? await said(`lanes/${identity().id.slice(0, 8)}.json`) : null;
  else facts.offer = await said('swarm.json');
  if (!facts.status?.paired) facts.lane = null; // meanwhile
  render();
}

/** @param {string} path @returns {Promise<any>} */
async function said(path) {
  const answer = await fetch(path, { cache: 'no-store' }).catch(() => null);
  return answer?.ok ? answer.json().catch(() => null) : null;
}

setInterval(askRelay, ASK_RELAY_MS);
setInterval(() => {
  if (worker === null) return;
  keepTotal();
  runs.begin(Date.now());
}, BEAT_MS);

/** Runs of other tabs that still are; null where the browser cannot tell. @returns {Promise<Set<string>|null>} */
async function aliveRuns() {
  const locks = await navigator.locks?.query().catch(() => null);
  return locks ? new Set((locks.held ?? []).map(({ name = '' }) => name.replace(/^run-/, ''))) : null;
}

/** Begin by ourselves where the owner agreed and the last runs did not crash. */
async function arrive() {
  const crashed = runs.look(await aliveRuns(), Date.now());
  if (crashed) {
    pledge.lower();
    facts.notice = CRASHED;
  }
  const asked = new URLSearchParams(location.search).get('auto') === '1' || fragment.has('auto');
  switch (runs.plan(asked, navigator.userAgent.includes(AGREED_AGENT))) {
    case 'start': start(false); break;
    case 'ask': facts.notice ||= ASKED; break;
    case 'crashed': facts.notice = CRASHED_OFTEN; break;
    case 'wait': break;
  }
  if (worker === null && device.workers) askStore('kept');
  document.body.dataset.ready = 'true';
  askRelay();
  render();
}

document.body.dataset.secure = String(device.secure);
document.getElementById('boot')?.remove();
render();
arrive();

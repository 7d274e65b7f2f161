/** The page's entry: starts the worker and shows its state. It knows no protocol. */

import { lookAtDevice, MB, workersFor } from './device.js';
import { identity, meetBackbone } from './identity.js';
import { RtcHost } from './transports/webrtc.js';
import { SurroundingsWatch } from './surroundings.js';
import { ContributePanel } from './ui/contribute.js';
import { FactsPanel } from './ui/facts.js';
import { NumbersPanel } from './ui/numbers.js';
import { PledgePanel } from './ui/pledge.js';

/** @typedef {import('./client.js').Status} Status */

const LANE_MS = 10_000;
const TOO_OLD = 'The page’s worker does not start. Reload the page; if that does not help, use a current Chrome, Edge, Firefox or Safari (iOS 16.4 or later).';

/** What the address asks for behind #: `auto`, `key=` fingerprint of the only backbone to work for. */
const fragment = new URLSearchParams(location.hash.slice(1));

const device = lookAtDevice();
const rtc = new RtcHost();
/** @type {Worker|null} */
let worker = null;
/** @type {Status|null} */
let status = null;
/** What was contributed since the page was opened, before the present start. */
let before = { calls: 0, rows: 0 };

const pledge = new PledgePanel(device);
const numbers = new NumbersPanel();
const facts = new FactsPanel(device, forget);
const surroundings = new SurroundingsWatch(() => {
  facts.show(status, surroundings.now);
  tell({ type: 'power', power: surroundings.power() });
});
const contribute = new ContributePanel({ start, pause: (paused) => tell({ type: 'pause', paused }), leave }, pledge);

/** @param {object} message */
function tell(message) {
  worker?.postMessage(message);
}

/** @param {() => void} [onForgotten] @returns {Worker} */
function openWorker(onForgotten) {
  const opened = new Worker(new URL('worker.js', import.meta.url), { type: 'module' });
  opened.onmessage = ({ data }) => {
    if (data.type === 'status') show(data.status);
    else if (data.type === 'rtc') rtc.answer(data.offer);
    else onForgotten?.();
  };
  opened.onerror = (event) => {
    event.preventDefault();
    stopWorker();
    contribute.running(false);
    contribute.warn(event.message ? `The page’s worker failed: ${event.message}. Reload the page to try again.` : TOO_OLD);
    document.body.dataset.state = 'failed';
  };
  return opened;
}

function stopWorker() {
  worker?.terminate();
  worker = null;
  rtc.close();
  surroundings.keepAwake(false);
}

/** @param {number} memoryMb */
function start(memoryMb) {
  if (worker !== null) return;
  if (device.inApp === null && !pledge.reduced) contribute.warn('');
  facts.offerForget(false);
  worker = openWorker();
  const settings = {
    page: new URL('./', location.href).href,
    memoryBytes: memoryMb * MB,
    name: nameOf(),
    identity: identity(),
    power: surroundings.power(),
    pinned: fragment.get('key'),
    rtc: rtc.able,
    workers: askedWorkers() ?? workersFor(device),
    gpu: device.webgpu && new URLSearchParams(location.search).get('gpu') === '1',
  };
  tell({ type: 'start', settings });
  contribute.running(true);
  surroundings.keepAwake(true);
  navigator.storage?.persist?.().catch(() => false); // a wish; browsers decide by themselves
}

/** `?workers=3` in the address overrides what we would choose. @returns {number|null} */
function askedWorkers() {
  const number = Number(new URLSearchParams(location.search).get('workers'));
  return Number.isInteger(number) && number >= 1 && number <= 64 ? number : null;
}

function leave() {
  tell({ type: 'leave' });
}

/** Delete what former visits kept; possible while nothing runs. */
function forget() {
  const sweeper = openWorker(() => {
    sweeper.terminate();
    facts.offerForget(false);
  });
  sweeper.postMessage({ type: 'forget' });
}

/** @param {Status} latest */
function show(latest) {
  if (worker === null) return; // said before it was stopped
  const now = { ...latest, calls: before.calls + latest.calls, rows: before.rows + latest.rows };
  status = now;
  contribute.show(now);
  numbers.show(now);
  facts.show(now, surroundings.now);
  pledge.mark(now.state === 'ASSIGNED');
  const { dataset } = document.body;
  dataset.state = now.state.toLowerCase();
  dataset.calls = String(now.calls);
  dataset.layers = String(now.layers);
  dataset.seal = now.seal;
  dataset.backbone = now.backbone ?? '';
  if (now.seal === 'sealed' && now.backbone !== null) warnOfStranger(now.backbone);
  dataset.kernel = now.kernelTest === 'passed' ? now.kernel : now.kernelTest;
  if (now.state === 'CLOSED') {
    before = now;
    stopWorker(); // memory given to WebAssembly comes back only so
    facts.offerForget(now.store !== 'memory' && now.keptBytes > 0);
  }
}

/** A key that was never seen here, where another one was: who pinned none should know. @param {string} backbone */
function warnOfStranger(backbone) {
  const known = meetBackbone(backbone);
  if (known !== null && !fragment.has('key')) {
    contribute.warn(`The model’s computer shows another key (${backbone}) than before (${known}). If nobody told you of a change, stop and ask whoever gave you this address.`);
  }
}

/** How others see this device: its kind, nothing personal. */
function nameOf() {
  const agent = navigator.userAgent;
  const kind = device.ios ? 'iPhone or iPad' : /Android/.test(agent) ? 'Android' : /Mac/.test(agent) ? 'Mac' : /Windows/.test(agent) ? 'Windows' : 'Linux';
  const browser = /Firefox|FxiOS/.test(agent) ? 'Firefox' : /Edg/.test(agent) ? 'Edge' : /Chrome|CriOS/.test(agent) ? 'Chrome' : 'Safari';
  return `${browser}, ${kind}`;
}

document.body.dataset.secure = String(device.secure);
document.getElementById('boot')?.remove();
facts.show(null, surroundings.now);
if (!device.workers) contribute.warn(TOO_OLD);
else if (device.inApp !== null) contribute.warn(`This is the browser inside ${device.inApp}, which may stop the page at any time. Open the address in Safari, Chrome or Firefox instead.`);
else if (pledge.reduced) contribute.warn('Last time this page ended while it loaded, perhaps for lack of memory. Less is proposed now.');

// The browser's own signs that the page stops or goes on. The worker checks the clock as well.
addEventListener('pagehide', () => {
  pledge.mark(false);
  tell({ type: 'sleep', reason: 'page hidden' });
});
document.addEventListener('freeze', () => tell({ type: 'sleep', reason: 'page frozen' }));
for (const sign of ['pageshow', 'online']) addEventListener(sign, () => tell({ type: 'look' }));
document.addEventListener('resume', () => tell({ type: 'look' }));
// Wi-Fi to cellular: the old socket may look open for minutes. Not every browser tells by the second sign.
addEventListener('online', () => tell({ type: 'network' }));
/** @type {any} */ (navigator).connection?.addEventListener?.('change', () => tell({ type: 'network' }));
document.addEventListener('visibilitychange', () => {
  if (document.visibilityState !== 'visible') return;
  tell({ type: 'look' });
  if (worker !== null) surroundings.keepAwake(true);
});

/** Ask the relay what the backbone says of our lane; only while somebody looks. */
async function lookAtLane() {
  if (status?.state !== 'ASSIGNED' || document.visibilityState !== 'visible') return;
  const answer = await fetch(`lanes/${identity().id.slice(0, 8)}.json`, { cache: 'no-store' }).catch(() => null);
  facts.lane = answer?.ok ? await answer.json().catch(() => null) : null;
  facts.show(status, surroundings.now);
}
setInterval(lookAtLane, LANE_MS);

const asked = new URLSearchParams(location.search).get('auto') === '1' || fragment.has('auto');
if (asked && device.workers) start(pledge.chosenMb());

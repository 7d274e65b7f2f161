/**
 * The page's worker: socket, kernel and heartbeats live here, where a hidden tab's timers are not slowed down.
 *
 * In:  {type: 'start', settings} · {type: 'pause', paused} · {type: 'leave'} · {type: 'sleep', reason} · {type: 'look'} · {type: 'network'}
 *      {type: 'power', power} · {type: 'kept'} · {type: 'forget'}
 * Out: {type: 'status', status} · {type: 'kept', keptBytes, goneBytes} · {type: 'rtc', offer: {sdp, stun, port}}
 */

import { NodeClient } from './client.js';
import { messageOf, Unreachable } from './errors.js';
import { KernelBuilds } from './kernels/choose.js';
import { ChosenKernel } from './kernels/chosen.js';
import { PoolKernel } from './kernels/pool.js';
import { WebGpuKernel } from './kernels/webgpu.js';
import { sealPolicy } from './keys.js';
import { Keeper, openStore, openStores } from './store.js';
import { RtcTransport } from './transports/webrtc.js';
import { linkUrl, relayConnector, WebSocketTransport } from './transports/websocket.js';

const STATUS_MS = 250;
const TICK_MS = 1000;
const JUMP_MS = 6000; // a tick this late means we did not run: no session survives that unnoticed

/**
 * @typedef {object} Settings
 * @property {string} page  the page's URL
 * @property {number} memoryBytes
 * @property {string} name
 * @property {import('./client.js').Identity} identity
 * @property {{battery: number|null, metered: boolean}} power
 * @property {string|null} pinned  fingerprint of the only backbone to work for
 * @property {boolean} rtc  whether the page can open data channels
 * @property {number} workers  that compute; with one, this worker computes itself
 * @property {boolean} paused  from the start
 * @property {boolean} gpu  whether the graphics device is asked first; only backbones that allow inexact nodes call it
 */

/** @type {NodeClient|null} */
let client = null;
/** @type {ReturnType<typeof setTimeout>|undefined} */
let due;
let lastTick = Date.now();

/** @param {Settings} settings */
async function start({ page, pinned, memoryBytes, name, identity, power, workers, gpu, rtc, paused }) {
  const keeper = new Keeper(await openStore(), memoryBytes);
  await keeper.open();
  const builds = new KernelBuilds((build) => compileKernel(new URL(`kernels/kernel-${build}.wasm`, page)));
  /** @type {RequestCache} */
  const cache = keeper.store.kind === 'memory' ? 'default' : 'no-store'; // do not keep everything twice
  client = new NodeClient({
    memoryBytes,
    name,
    identity,
    power,
    keeper,
    agent: `page ${navigator.userAgent}`.slice(0, 200),
    connect: relayConnector(page),
    seal: await sealPolicy(pinned),
    ways: {
      direct: (url, handlers) => new WebSocketTransport(linkUrl(url, new URL(page).hostname), handlers, 'direct'),
      ...(rtc ? { webrtc: openChannel } : {}),
    },
    loadKernel: async (onLost) => {
      const graphics = gpu && !builds.out.has('webgpu') ? await loadGraphics(builds, page, onLost) : null;
      return graphics ?? loadKernel(builds, workers, onLost);
    },
    dropKernel: (build, why) => {
      builds.drop(build, why);
      return true; // when none is left, loading says so
    },
    fetchSlice: (slice, signal, from) => {
      /** @type {Record<string, string>} */
      const rest = from > 0 ? { range: `bytes=${from}-`, 'if-range': `"${slice}"` } : {};
      return fetch(new URL(`slices/${slice}`, page), { signal, cache, headers: rest });
    },
    onChange: report,
  });
  client.start();
  client.pause(paused);
}

/** Several workers where the browser lets us have them, else this one. @param {KernelBuilds} builds @param {number} workers @param {(experts: import('./kernels/kernel.js').PackedExpert[], why: string) => void} onLost */
async function loadKernel(builds, workers, onLost) {
  for (; workers > 1; workers >>= 1) {
    const spawn = () => new Worker(new URL('kernels/pool-worker.js', import.meta.url), { type: 'module' });
    try {
      return await PoolKernel.open({ builds, count: workers, spawn, onLost });
    } catch (error) {
      if (error instanceof Unreachable) throw error;
      console.warn(`no pool of ${workers} workers: ${messageOf(error)}`); // no memory for so many, or none inside workers
    }
  }
  await builds.open();
  return new ChosenKernel(builds, onLost); // a wrong build shows in this thread as well
}

/**
 * Have the page answer an offer: workers have no RTCPeerConnection.
 * @type {NonNullable<import('./links.js').Ways['webrtc']>}
 */
function openChannel(offer, handlers, say) {
  const { port1, port2 } = new MessageChannel();
  postMessage({ type: 'rtc', offer: { ...offer, port: port2 } }, { transfer: [port2] });
  return new RtcTransport(port1, handlers, say);
}

/** The kernel on the graphics device, or null. @param {KernelBuilds} builds @param {string} page @param {(experts: import('./kernels/kernel.js').PackedExpert[], why: string) => void} onLost */
async function loadGraphics(builds, page, onLost) {
  const exact = builds.kernel(await builds.open());
  try {
    const read = (/** @type {string} */ name) => readText(new URL(`src/kernels/webgpu/${name}.wgsl`, page));
    return await WebGpuKernel.open({ exact, read, onLost });
  } catch (error) {
    builds.drop('webgpu', messageOf(error));
    return null;
  }
}

/** Compile while the bytes come; the browser may keep what it compiled. @param {URL} url @returns {Promise<WebAssembly.Module>} */
async function compileKernel(url) {
  const response = await get(url);
  try {
    const typed = response.headers.get('content-type')?.startsWith('application/wasm');
    return await (typed ? WebAssembly.compileStreaming(response) : WebAssembly.compile(await response.arrayBuffer()));
  } catch (error) {
    if (error instanceof WebAssembly.CompileError) throw error;
    throw new Unreachable(`the kernel could not be loaded: ${messageOf(error)}`);
  }
}

/** @param {URL} url */
async function readText(url) {
  try {
    return await (await get(url)).text();
  } catch (error) {
    throw new Unreachable(`${url.pathname} could not be loaded: ${messageOf(error)}`);
  }
}

/** @param {URL} url @returns {Promise<Response>} */
async function get(url) {
  try {
    const response = await fetch(url);
    if (!response.ok) throw new Error(`status ${response.status}`);
    return response;
  } catch (error) {
    throw new Unreachable(`${url.pathname} could not be loaded: ${messageOf(error)}`);
  }
}

/** Tell the page how things stand, a few times a second at most. */
function report() {
  due ??= setTimeout(() => {
    due = undefined;
    if (client !== null) postMessage({ type: 'status', status: client.status() });
  }, STATUS_MS);
}

/** Wake when we slept or did not run for a while, whatever the browser tells or does not tell. */
function look() {
  const now = Date.now();
  const ran = Math.max(lastTick, client?.host.ranAt ?? 0);
  const jumped = now - ran > JUMP_MS || now < ran - JUMP_MS;
  lastTick = now;
  if (jumped || client?.machine.asleep) client?.wake();
}

setInterval(() => {
  if (!client?.machine.asleep) look();
  if (client !== null && client.machine.state !== 'CLOSED') report();
}, TICK_MS);

/** Say what is kept, and what is gone of it; a page that only asks has no node. @param {boolean} clear */
async function tellKept(clear) {
  const keepers = client !== null ? [client.options.keeper] : (await openStores()).map((store) => new Keeper(store, 0));
  const said = { type: 'kept', keptBytes: 0, goneBytes: 0 };
  for (const keeper of keepers) {
    if (client === null) await keeper.open();
    if (clear) said.goneBytes += await keeper.clear();
    said.keptBytes += keeper.keptBytes;
  }
  postMessage(said);
}

/** What was said while the node was being made waits for it. */
let started = Promise.resolve();

addEventListener('message', ({ data }) => {
  if (data.type === 'start') {
    started = start(data.settings);
    started.catch((error) => setTimeout(() => { throw error; })); // a rejection alone would not reach the page
  } else started.then(() => handle(data), () => undefined);
});

/** @param {any} data */
function handle(data) {
  switch (data.type) {
    case 'pause': client?.pause(data.paused); break;
    case 'leave': client?.leave('the owner left'); break;
    case 'sleep': client?.sleep(data.reason); break;
    case 'look':
      look();
      if (client?.host.kernel) client.host.testKernel(); // the page was away: is the arithmetic what it was?
      break;
    case 'network': client?.checkAlive(); break;
    case 'power': client?.setPower(data.power); break;
    case 'kept': tellKept(false); break;
    case 'forget': tellKept(true); break;
  }
}

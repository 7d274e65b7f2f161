/** What this browser offers and what it lacks, as plain facts; asks the browser once and decides nothing else. */

/**
 * @typedef {object} Device
 * @property {boolean} secure  https, or this very machine
 * @property {boolean} phone  a phone or tablet
 * @property {boolean} ios
 * @property {number|null} memoryGb  what the browser admits
 * @property {number} cores  what the browser admits, 1 when it says nothing
 * @property {boolean} webgpu
 * @property {boolean} webcrypto
 * @property {boolean} wakeLock
 * @property {boolean} storage  something that may outlive the page
 * @property {string|null} inApp  the app whose built-in browser this is
 * @property {boolean} workers  module workers and WebAssembly with SIMD can be tried
 */

/** A function that uses one SIMD instruction; the kernel has nothing else. */
const SIMD = Uint8Array.of(0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98, 11);

// Built-in browsers stop downloads, sleep early or hide the address bar (field reports).
const IN_APP = /** @type {[RegExp, string][]} */ ([
  [/FBAN|FBAV|FB_IAB/, 'Facebook'],
  [/Instagram/, 'Instagram'],
  [/\bLine\//, 'LINE'],
  [/MicroMessenger/, 'WeChat'],
  [/TikTok|musical_ly|BytedanceWebview/, 'TikTok'],
  [/Twitter for/, 'X'],
  [/LinkedInApp/, 'LinkedIn'],
  [/Snapchat/, 'Snapchat'],
]);

/** @param {any} [scope] the window, or what a test makes of it @returns {Device} */
export function lookAtDevice(scope = globalThis) {
  const navigator = scope.navigator ?? {};
  const agent = navigator.userAgent ?? '';
  // iPadOS calls itself a Mac, but a Mac has no touch screen.
  const ios = /iPhone|iPad|iPod/.test(agent) || (/Macintosh/.test(agent) && navigator.maxTouchPoints > 1);
  const phone = ios || /Android|Mobile/.test(agent) || navigator.userAgentData?.mobile === true;
  return {
    secure: scope.isSecureContext === true,
    phone,
    ios,
    memoryGb: typeof navigator.deviceMemory === 'number' ? navigator.deviceMemory : null,
    cores: navigator.hardwareConcurrency || 1,
    webgpu: navigator.gpu !== undefined,
    webcrypto: scope.crypto?.subtle !== undefined,
    wakeLock: navigator.wakeLock !== undefined,
    storage: navigator.storage?.getDirectory !== undefined || scope.caches !== undefined,
    inApp: IN_APP.find(([pattern]) => pattern.test(agent))?.[1] ?? null,
    workers: scope.Worker !== undefined && scope.WebAssembly?.validate?.(SIMD) === true,
  };
}

export const MB = 1_000_000;
const CHOICES_MB = [64, 128, 256, 512, 1000, 2000];

/**
 * The memory one may lend here, and what we propose. A phone's browser ends a page that takes too much, without a
 * word: iPhones near 1.5 GB all told, so 256 MB is the most we propose on any phone. Of the memory that the browser
 * admits, a quarter is the most that may be lent, and an eighth what we propose.
 * @param {Device} device
 * @returns {{choicesMb: number[], proposedMb: number}}
 */
export function pledges(device) {
  const kindMb = device.ios ? 256 : device.phone ? 1000 : 2000;
  const deviceMb = device.memoryGb === null ? Infinity : device.memoryGb * 1000;
  const upTo = (/** @type {number} */ mb) => CHOICES_MB.filter((choice, i) => i === 0 || choice <= mb);
  const proposals = upTo(Math.min(device.phone ? 256 : 512, deviceMb / 8));
  return { choicesMb: upTo(Math.min(kindMb, deviceMb / 4)), proposedMb: /** @type {number} */ (proposals.at(-1)) };
}

/** How many workers compute: a core stays free, and a phone stays cool. @param {Pick<Device, 'cores'|'phone'>} device */
export function workersFor({ cores, phone }) {
  return Math.max(1, Math.min(cores - 1, phone ? 2 : 4));
}

/**
 * What the browser withholds because of the address, and how to get it. Null when nothing is missing.
 * @param {Device} device
 * @returns {{why: string, lacks: string[], mend: string}|null}
 */
export function missing(device) {
  if (device.secure) return null;
  const lacks = [
    device.storage ? '' : 'Storage: model parts are loaded again at each visit',
    device.wakeLock ? '' : 'Wake lock: the screen may go dark, and the phone then stops the page',
    device.webgpu ? '' : 'WebGPU: the graphics processor stays idle',
    device.webcrypto ? '' : 'WebCrypto: we use our own, a little slower',
  ];
  return {
    why: 'Contributing works, but this address is plain http, so the browser withholds:',
    lacks: lacks.filter((text) => text !== ''),
    mend: 'To get all of it, open this relay by an https:// address. Its operator can tell you whether it has one.',
  };
}

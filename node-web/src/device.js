/** What this browser offers and what it lacks, as plain facts; asks the browser once and decides nothing else. */

/**
 * @typedef {object} Device
 * @property {boolean} secure  https, or this very machine
 * @property {boolean} phone  a phone or tablet
 * @property {boolean} ios
 * @property {number|null} memoryGb  what the browser admits
 * @property {boolean} webgpu
 * @property {boolean} webcrypto
 * @property {boolean} wakeLock
 * @property {boolean} storage  something that may outlive the page
 * @property {string|null} inApp  the app whose built-in browser this is
 * @property {boolean} workers  module workers and WebAssembly with SIMD can be tried
 */

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
    webgpu: navigator.gpu !== undefined,
    webcrypto: scope.crypto?.subtle !== undefined,
    wakeLock: navigator.wakeLock !== undefined,
    storage: navigator.storage?.getDirectory !== undefined || scope.caches !== undefined,
    inApp: IN_APP.find(([pattern]) => pattern.test(agent))?.[1] ?? null,
    workers: scope.Worker !== undefined && scope.WebAssembly !== undefined,
  };
}

export const MB = 1_000_000;
const CHOICES_MB = [64, 128, 256, 512, 1000, 2000];

/**
 * The memory one may lend here, and what we propose. A phone's browser ends a page that takes too much, without a
 * word: iPhones near 1.5 GB all told, so 256 MB is the most we propose on any phone.
 * @param {Device} device
 * @returns {{choicesMb: number[], proposedMb: number}}
 */
export function pledges(device) {
  const mostMb = device.ios ? 256 : device.phone ? 1000 : 2000;
  const choicesMb = CHOICES_MB.filter((mb) => mb <= mostMb);
  const small = device.memoryGb !== null && device.memoryGb <= 2;
  return { choicesMb, proposedMb: device.phone ? (small ? 128 : 256) : small ? 256 : 512 };
}

/**
 * What is missing and what one gets by mending it, in sentences.
 * @param {Device} device
 * @param {string} url the page's address
 * @returns {string[]}
 */
export function missing(device, url) {
  const sentences = [];
  if (device.inApp !== null) {
    sentences.push(`This is the browser inside ${device.inApp}, which may stop this page at any time. Open the address in Safari, Chrome or Firefox instead.`);
  }
  if (!device.secure) {
    const lacks = [
      device.storage ? null : 'storage that outlives the page (model parts are loaded again each time)',
      device.wakeLock ? null : 'keeping the screen awake',
      device.webgpu ? null : 'the graphics processor (WebGPU)',
      device.webcrypto ? null : 'the browser’s own cryptography (WebCrypto; we bring ours)',
    ].filter((text) => text !== null);
    const https = url.replace(/^http:/, 'https:').replace(/[?#].*$/, '');
    sentences.push(`This address is plain http, so the browser withholds ${list(lacks)}. Contributing works all the same.`);
    sentences.push(`To get them, open the relay by an https address (like ${https}, if its operator has set one up).`);
  }
  return sentences;
}

/** @param {string[]} items */
function list(items) {
  return items.length < 2 ? items.join('') : `${items.slice(0, -1).join(', ')} and ${items[items.length - 1]}`;
}

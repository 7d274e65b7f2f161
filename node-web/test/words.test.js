/** What the page says: words, numbers, and what it proposes for which device. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { lookAtDevice, missing, pledges } from '../src/device.js';
import { sessionUrl } from '../src/transports/websocket.js';
import { bytes, count, milliseconds, plural } from '../src/ui/format.js';
import { words } from '../src/ui/words.js';

const IPHONE = 'Mozilla/5.0 (iPhone; CPU iPhone OS 17_5 like Mac OS X) AppleWebKit/605.1.15 Version/17.5 Mobile/15E148 Safari/604.1';
const PIXEL = 'Mozilla/5.0 (Linux; Android 15; Pixel 8a) AppleWebKit/537.36 Chrome/129.0.0.0 Mobile Safari/537.36';
const LAPTOP = 'Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 Chrome/129.0.0.0 Safari/537.36';

/** @param {string} userAgent @param {object} [more] @param {object} [scope] */
const device = (userAgent, more = {}, scope = {}) =>
  lookAtDevice({ navigator: { userAgent, ...more }, isSecureContext: true, Worker: 1, WebAssembly: 1, ...scope });

/** @param {Partial<import('../src/client.js').Status>} status */
const say = (status) => words(/** @type {any} */ ({ reason: '', wanted: 0, loaded: 0, experts: 0, layers: 0, heldBytes: 0, ...status }));

test('bytes and counts keep three digits and never round up to a record', () => {
  assert.deepEqual([0, 999, 1000, 352_512, 33_841_152, 5e9].map(bytes), ['0 B', '999 B', '1.0 kB', '353 kB', '33.8 MB', '5.0 GB']);
  assert.deepEqual([0, 1234, 99_999, 199_999, 1_999_999].map(count), ['0', '1,234', '99,999', '199k', '1.99M']);
  assert.deepEqual([null, 0.1, 0.42, 7, 250].map(milliseconds), ['–', 'at most 0.1 ms', '0.42 ms', '7.0 ms', '250 ms']);
  assert.deepEqual([plural(1, 'layer'), plural(2, 'layer')], ['1 layer', '2 layers']);
});

test('a page that works for one key only says whom it does not work for', () => {
  const why = 'the backbone’s key is 12ab, not the pinned 34cd';
  const { headline, detail } = say({ state: 'OFFERED', seal: 'refused', sealWhy: why });
  assert.equal(headline, 'Not contributing');
  assert.match(detail, /12ab, not the pinned 34cd\.$/);
  assert.equal(say({ state: 'CONNECTING', seal: 'none' }).headline, 'Connecting…');
});

test('no phone is asked for more than 256 MB unless its owner chooses so', () => {
  assert.equal(pledges(device(IPHONE)).proposedMb, 256);
  assert.deepEqual(pledges(device(IPHONE)).choicesMb, [64, 128, 256]);
  assert.equal(pledges(device(PIXEL, { deviceMemory: 8 })).proposedMb, 256);
  assert.equal(pledges(device(PIXEL, { deviceMemory: 2 })).proposedMb, 128);
  assert.equal(pledges(device(LAPTOP)).proposedMb, 512);
});

test('an iPad that calls itself a Mac is still a phone to us', () => {
  const agent = 'Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) AppleWebKit/605.1.15 Version/17.5 Safari/605.1.15';
  assert.equal(device(agent, { maxTouchPoints: 5 }).phone, true);
  assert.equal(device(agent, { maxTouchPoints: 0 }).phone, false);
});

test('a plain http page says what is missing and how to get it', () => {
  const lan = device(PIXEL, {}, { isSecureContext: false });
  const text = JSON.stringify(missing(lan));
  assert.match(text, /WebGPU/);
  assert.match(text, /WebCrypto/);
  assert.match(text, /Wake lock/);
  assert.match(text, /Storage/);
  assert.match(text, /https:\/\//);
  assert.equal(missing(device(PIXEL, { gpu: {} })), null);
});

test('the browser inside an app is named', () => {
  assert.equal(device(`${IPHONE} Instagram 300.0`).inApp, 'Instagram');
  assert.equal(device(IPHONE).inApp, null);
});

test('every state has a headline, and loading has a progress', () => {
  const states = /** @type {const} */ (['CONNECTING', 'GREETED', 'OFFERED', 'ASSIGNED', 'SERVING', 'PAUSED', 'ASLEEP', 'DRAINING', 'CLOSED']);
  for (const state of states) assert.ok(say({ state }).headline);
  assert.equal(say({ state: 'ASSIGNED', wanted: 96, loaded: 24 }).progress, 0.25);
  assert.match(say({ state: 'ASSIGNED', wanted: 96, loaded: 24 }).detail, /24 of 96/);
});

test('a node that was stopped says why', () => {
  assert.match(say({ state: 'CLOSED', reason: 'the relay refused this identity' }).detail, /^The relay refused this identity\.$/);
  assert.equal(say({ state: 'CLOSED', reason: 'left' }).headline, 'Thank you');
});

test('the session is on the same host, below the page, encrypted when the page is', () => {
  assert.equal(sessionUrl('https://relay.example/'), 'wss://relay.example/v1/session');
  assert.equal(sessionUrl('http://192.168.1.7:8080/swarm/?auto=1#auto'), 'ws://192.168.1.7:8080/swarm/v1/session');
});

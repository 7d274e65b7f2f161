/** What the page says: words, numbers, and what it proposes for which device. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { lookAtDevice, missing, pledges } from '../src/device.js';
import { sessionUrl } from '../src/transports/websocket.js';
import { bytes, count, milliseconds, plural } from '../src/ui/format.js';
import { activityOf, difficulty, HELPING_S, pauseLabel, words } from '../src/ui/words.js';

const IPHONE = 'Mozilla/5.0 (iPhone; CPU iPhone OS 17_5 like Mac OS X) AppleWebKit/605.1.15 Version/17.5 Mobile/15E148 Safari/604.1';
const PIXEL = 'Mozilla/5.0 (Linux; Android 15; Pixel 8a) AppleWebKit/537.36 Chrome/129.0.0.0 Mobile Safari/537.36';
const LAPTOP = 'Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 Chrome/129.0.0.0 Safari/537.36';

/** @param {string} userAgent @param {object} [more] @param {object} [scope] */
const device = (userAgent, more = {}, scope = {}) =>
  lookAtDevice({ navigator: { userAgent, ...more }, isSecureContext: true, Worker: 1, WebAssembly, ...scope });

const NOTHING = { reason: '', wanted: 0, loaded: 0, experts: 0, layers: 0, heldBytes: 0, pledgedBytes: 0, paired: false, sinceCallS: null, seal: 'none', sealWhy: '' };

/** @param {Partial<import('../src/client.js').Status>} status */
const say = (status) => words(/** @type {any} */ ({ ...NOTHING, ...status }));

/** The last space does not break a line. @param {string} text */
const whole = (text) => text.replace(/ (?=\S+$)/, '\u00a0');

test('bytes and counts keep three digits and never round up to a record', () => {
  assert.deepEqual([0, 999, 1000, 352_512, 33_841_152, 5e9].map(bytes), ['0 B', '999 B', '1.0 kB', '353 kB', '33.8 MB', '5.0 GB'].map(whole));
  assert.deepEqual([0, 1234, 99_999, 199_999, 1_999_999].map(count), ['0', '1,234', '99,999', '199k', '1.99M']);
  assert.deepEqual([null, 0.1, 0.42, 7, 250].map(milliseconds), ['–', 'at most 0.1 ms', '0.42 ms', '7.0 ms', '250 ms'].map(whole));
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

test('no more than a quarter of the memory that the browser admits may be lent, and an eighth is proposed', () => {
  for (const agent of [PIXEL, LAPTOP]) {
    for (const deviceMemory of [0.25, 0.5, 1, 2, 4, 8, 32]) {
      const { choicesMb, proposedMb } = pledges(device(agent, { deviceMemory }));
      assert.ok(choicesMb.includes(proposedMb));
      for (const mb of choicesMb) assert.ok(mb === 64 || mb <= deviceMemory * 250, `${mb} MB of ${deviceMemory} GB`);
      assert.ok(proposedMb === 64 || proposedMb <= deviceMemory * 125);
    }
  }
  assert.deepEqual(pledges(device(PIXEL, { deviceMemory: 0.5 })), { choicesMb: [64], proposedMb: 64 });
});

test('a browser without WebAssembly, or without SIMD in it, cannot compute', () => {
  assert.equal(device(LAPTOP).workers, true);
  assert.equal(device(LAPTOP, {}, { WebAssembly: undefined }).workers, false);
  assert.equal(device(LAPTOP, {}, { WebAssembly: { validate: () => false } }).workers, false);
  assert.equal(device(LAPTOP, {}, { Worker: undefined }).workers, false);
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
  assert.equal(say({ state: 'ASSIGNED', paired: true, wanted: 96, loaded: 24 }).progress, 0.25);
  assert.match(say({ state: 'ASSIGNED', paired: true, wanted: 96, loaded: 24 }).detail, /24 of 96/);
});

test('a node that was stopped says why', () => {
  assert.match(say({ state: 'CLOSED', reason: 'the relay refused this identity' }).detail, /^The relay refused this identity\.$/);
  assert.equal(say({ state: 'CLOSED', reason: 'left' }).headline, 'Thank you');
});

test('the session is on the same host, below the page, encrypted when the page is', () => {
  assert.equal(sessionUrl('https://relay.example/'), 'wss://relay.example/v1/session');
  assert.equal(sessionUrl('http://192.168.1.7:8080/swarm/?auto=1#auto'), 'ws://192.168.1.7:8080/swarm/v1/session');
});

const STATES = /** @type {const} */ (['CONNECTING', 'GREETED', 'OFFERED', 'ASSIGNED', 'SERVING', 'PAUSED', 'ASLEEP', 'DRAINING', 'CLOSED']);

/** Every combination of the facts that decide. @returns {Generator<[any, import('../src/holds.js').Hold]>} */
function* situations() {
  for (const state of STATES)
    for (const paired of [false, true])
      for (const [wanted, loaded] of [[0, 0], [9, 0], [9, 8], [9, 9]])
        for (const sinceCallS of [null, 0, HELPING_S - 0.1, HELPING_S, 70])
          for (const seal of ['none', 'sealed', 'unsealed', 'refused'])
            for (const reason of ['', 'left', 'the connection broke'])
              for (const hold of /** @type {const} */ ([null, 'owner', 'battery', 'metered']))
                yield [{ ...NOTHING, state, paired, wanted, loaded, experts: loaded, layers: 1, heldBytes: loaded * 1e6, pledgedBytes: 64e6, sinceCallS, seal, reason }, hold];
}

test('in every situation the page says what is true', () => {
  for (const [status, hold] of situations()) {
    const { activity, headline, detail, link, linkText, progress } = words(status, hold);
    const where = `${JSON.stringify(status)} ${hold}`;
    assert.ok(headline && detail && linkText, where);
    const there = status.paired && status.seal !== 'refused' && ['OFFERED', 'ASSIGNED', 'SERVING'].includes(status.state);
    const whole = status.loaded === status.wanted && status.wanted > 0;
    const called = status.sinceCallS !== null && status.sinceCallS < HELPING_S;
    assert.equal(headline === 'Contributing', there && whole && called, where);
    assert.equal(activity === 'helping', there && whole && called, where);
    assert.equal(activity === 'idle', there && whole && !called, where);
    assert.equal(link === 'up', there && status.wanted > 0, `green: ${where}`);
    assert.equal(progress !== null, there && status.wanted > 0 && !whole, where);
    assert.equal(/paused/i.test(linkText), status.state === 'PAUSED', where);
    assert.doesNotMatch(`${headline} ${detail} ${linkText}`, /undefined|NaN|null|\(\d{4}\)|\.\./, where);
    assert.equal(activity, activityOf(status, hold));
  }
});

test('what failed is told in words, whatever the code', () => {
  for (const code of ['slice_fault', 'unreachable', 'kernel_fault', 'bad_seal', 'not_served', '', 'anything', 'constructor']) {
    assert.match(difficulty(code), /^[a-z][^\d]+$/);
  }
});

test('the button says what a press does', () => {
  assert.deepEqual([null, 'owner', 'battery', 'metered'].map((hold) => pauseLabel(/** @type {any} */ (hold))), ['Pause', 'Resume', 'Go on all the same', 'Go on all the same']);
});

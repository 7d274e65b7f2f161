/** What the verifying page says of a report. */
import assert from 'node:assert/strict';
import { test } from 'node:test';

import { facts, verdict } from '../src/verify/words.js';

/** @param {Partial<import('../src/verify/words.js').Report>} part */
const report = (part) => ({
  agree: false, facts: { node: { name: 'n', kernel: 'native-avx2' } }, wrong_slices: [], differing: 0, compared: 10,
  differences: /** @type {any} */ ([]), worst: 0, error: '', ...part,
});

test('only equal bytes from the right weights are called equal', () => {
  assert.equal(verdict(report({ agree: true })).verdict, 'agree');
  assert.equal(verdict(report({ differing: 1, worst: 1e-9 })).verdict, 'differ');
  assert.equal(verdict(report({ wrong_slices: [3] })).verdict, 'differ');
  assert.equal(verdict(report({ error: 'cut off' })).verdict, 'unread');
  assert.equal(verdict(report({ agree: true, error: 'cut off' })).verdict, 'unread');
});

test('a graphics device is told whether it is within its tolerance, no other node is', () => {
  const of = (/** @type {string} */ kernel, /** @type {number} */ worst) => verdict(report({ differing: 2, worst, facts: { node: { name: 'n', kernel } } })).detail;
  assert.match(of('webgpu', 1e-6), /within that/);
  assert.match(of('webgpu', 0.1), /beyond that/);
  assert.match(of('wasm-plain', 1e-6), /No kernel of this class/);
});

test('a file that could not be read has no facts', () => {
  assert.deepEqual(facts(report({ error: 'cut off', facts: {} })), []);
});

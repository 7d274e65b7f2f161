/** How the page's runs ended, and what the next visit does. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { BEAT_MS, MOST_CRASHES, Runs } from '../src/runs.js';

/** @returns {import('../src/runs.js').Notes} */
function notes() {
  /** @type {Map<string, string>} */
  const kept = new Map();
  return { get: (key) => kept.get(key) ?? null, set: (key, value) => void kept.set(key, value) };
}

const NOBODY = /** @type {Set<string>} */ (new Set());

test('nothing begins by an address alone; after a press it does, until the owner stops', () => {
  const device = notes();
  const runs = new Runs(device, notes(), 'a');
  assert.equal(runs.plan(false), 'wait');
  assert.equal(runs.plan(true), 'ask');
  runs.agree();
  runs.begin(0);
  assert.equal(new Runs(device, notes(), 'b').plan(true), 'start', 'another tab of the same owner');
  assert.equal(new Runs(device, notes(), 'b').plan(false), 'wait');
  runs.ended(true);
  assert.equal(runs.plan(true), 'ask');
  assert.equal(runs.plan(false), 'wait');
});

test('a reload goes on where this tab was at work', () => {
  const [device, tab] = [notes(), notes()];
  new Runs(device, tab, 'a').begin(0);
  new Runs(device, tab, 'a').left();
  const again = new Runs(device, tab, 'b');
  assert.equal(again.look(NOBODY, 10), false, 'no crash');
  assert.equal(again.plan(false), 'start');
});

for (const [way, alive] of /** @type {const} */ ([['locks', NOBODY], ['the tab’s own notes', null]])) {
  test(`after one crash it begins again, after two it never does by itself (told by ${way})`, () => {
    const [device, tab] = [notes(), notes()];
    const first = new Runs(device, tab, '0');
    first.agree();
    first.begin(0);
    for (let crash = 1; crash <= 6; crash++) {
      const next = new Runs(device, tab, String(crash));
      assert.equal(next.look(alive, 100), true);
      assert.equal(next.look(alive, 100), false, 'each crash counts once');
      assert.equal(next.plan(true), crash < MOST_CRASHES ? 'start' : 'crashed');
      next.begin(100); // the owner pressed Start
    }
  });
}

test('a run in another tab is no crash', () => {
  const device = notes();
  new Runs(device, notes(), 'a').begin(1000);
  const other = new Runs(device, notes(), 'b');
  assert.equal(other.look(new Set(['a']), 1e9), false, 'its lock is held');
  assert.equal(other.look(null, 1000 + 2 * BEAT_MS), false, 'its mark is fresh');
  assert.equal(other.look(null, 1000 + 4 * BEAT_MS), true, 'its mark is old');
});

test('a run that lasted, and an owner who stopped, make up for crashes; a worker that crashed counts', () => {
  const runs = new Runs(notes(), notes(), 'a');
  runs.begin(0);
  runs.failed();
  runs.begin(0);
  runs.failed();
  assert.equal(runs.crashes, 2);
  assert.equal(runs.plan(true), 'crashed');
  runs.settled();
  assert.equal(runs.crashes, 0);
  runs.failed();
  runs.ended(true);
  assert.equal(runs.crashes, 0);
});

test('spoilt notes are no notes', () => {
  for (const spoilt of ['', '{', 'null', '7', '"a"']) {
    const device = notes();
    device.set('runs', spoilt);
    device.set('crashes', 'many');
    assert.equal(new Runs(device, notes(), 'a').look(NOBODY, 0), false);
    assert.equal(new Runs(device, notes(), 'a').crashes, 0);
  }
});

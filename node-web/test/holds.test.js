/** When this device holds back: owner, battery, a line that costs money. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { ENOUGH_LEVEL, holdFor, LOW_LEVEL, pressed } from '../src/holds.js';

const NONE = { paused: false, lowBattery: false, metered: false };
/** @param {number} level @param {boolean} [charging] */
const battery = (level, charging = false) => ({ battery: { level, charging }, metered: false });

test('a battery that runs low holds it, a charger or enough of it lets it go on', () => {
  assert.equal(holdFor(battery(0.16), NONE, null), null);
  assert.equal(holdFor(battery(LOW_LEVEL), NONE, null), 'battery');
  assert.equal(holdFor(battery(0.04), NONE, null), 'battery');
  assert.equal(holdFor(battery(0.04, true), NONE, 'battery'), null);
  assert.equal(holdFor(battery(0.2), NONE, 'battery'), 'battery', 'not to and fro');
  assert.equal(holdFor(battery(ENOUGH_LEVEL + 0.01), NONE, 'battery'), null);
  assert.equal(holdFor({ battery: null, metered: false }, NONE, null), null, 'nobody tells');
});

test('a line that costs money holds it until its owner agrees, or the line is another', () => {
  const metered = { battery: null, metered: true };
  assert.equal(holdFor(metered, NONE, null), 'metered');
  assert.equal(holdFor(metered, { ...NONE, metered: true }, 'metered'), null);
  assert.equal(holdFor({ battery: null, metered: false }, NONE, 'metered'), null);
});

test('one press does what the button says, in every situation', () => {
  for (const around of [battery(0.04), battery(0.9), { battery: null, metered: true }, { ...battery(0.04), metered: true }]) {
    let wishes = NONE;
    let hold = holdFor(around, wishes, null);
    for (let presses = 0; hold !== null; presses++) {
      assert.ok(presses < 2, 'one press for each reason');
      const before = hold;
      wishes = pressed(hold, wishes);
      hold = holdFor(around, wishes, hold);
      assert.notEqual(hold, before);
    }
    wishes = pressed(hold, wishes);
    hold = holdFor(around, wishes, hold);
    assert.equal(hold, 'owner', 'who pauses is obeyed first');
    assert.equal(holdFor(around, pressed(hold, wishes), hold), null);
  }
});

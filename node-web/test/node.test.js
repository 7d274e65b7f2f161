/** The node's state machine against the scenarios it shares with `backbone/node/machine.py`. */
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';
import { backoffS, FINAL_CLOSES, NodeMachine, OVERLOADED, reconnectS } from '../src/node.js';
import { FATAL } from '../src/wire/close.js';

const VECTORS = JSON.parse(readFileSync(new URL('../../tests/vectors/node_machine.json', import.meta.url), 'utf8'));

/** snake_case keys become camelCase; numbers as keys and slice ids stay. @param {any} value @returns {any} */
function camel(value) {
  if (Array.isArray(value)) return value.map(camel);
  if (value === null || typeof value !== 'object') return value;
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key.replace(/_([a-z])/g, (_, c) => c.toUpperCase()), camel(item)]));
}

for (const scenario of VECTORS.scenarios) {
  test(scenario.name, () => {
    const machine = new NodeMachine(camel(scenario.config), () => scenario.jitter);
    scenario.steps.forEach((/** @type {any} */ step, /** @type {number} */ number) => {
      const where = `step ${number}: ${JSON.stringify(step.event ?? 'timer')}`;
      const effects = step.timer ? machine.handleTimer(step.at) : machine.receive(camel(step.event), step.at);
      assert.deepEqual(effects, camel(step.effects), where);
      if ('state' in step) assert.equal(machine.state, step.state, where);
      if ('next_timer' in step) assert.equal(machine.nextTimer(), step.next_timer, where);
    });
  });
}

test('the closes after which a node stops are those the protocol calls fatal', () => {
  assert.deepEqual([...FINAL_CLOSES.keys()].sort(), [...FATAL].sort());
});

test('backoff grows to its cap and never falls below half', () => {
  assert.deepEqual([0, 1, 2, 6, 500].map((n) => backoffS(n, 1)), [0.5, 1, 2, 30, 30]);
  assert.equal(backoffS(0, 0), 0.25);
  assert.deepEqual([0, 1, 2, 3, 500].map((n) => reconnectS(1006, n, 1)), [0.5, 1, 2, 3, 3]);
  assert.equal(reconnectS(OVERLOADED, 0, 1), 30);
});

/** The numbers panel: what was contributed, measured here and nowhere rounded up. */

import { element, make, say } from './dom.js';
import { bytes, count, milliseconds } from './format.js';

/**
 * @typedef {import('../client.js').Status} Status
 * @typedef {import('./view.js').Work} Work
 * @typedef {[string, (s: Status, before: Work) => string]} Row
 */

const BIG = /** @type {Row[]} */ ([
  ['calls answered', (s) => count(s.calls)],
  ['tokens helped', (s) => count(s.tokens)],
  ['layers held', (s) => count(s.layers)],
  ['model data held', (s) => bytes(s.heldBytes)],
]);

const DETAILS = /** @type {Row[]} */ ([
  ['Rows computed', (s) => count(s.rows)],
  ['Time per call (median)', (s) => milliseconds(s.medianMs)],
  ['Speed of this device', (s) => (s.gbPerS ? `${s.gbPerS.toFixed(1)}\u00a0GB/s` : '–')],
  ['Received · sent', (s) => `${bytes(s.bytesIn)} · ${bytes(s.bytesOut)}`],
  ['Path', (s) => (s.path ? `${s.path}${s.rttMs === null ? '' : `, ${milliseconds(s.rttMs)} round trip to the relay`}` : '–')],
  ['Sealed against the relay', (s) => ({ sealed: 'yes', unsealed: 'no', refused: 'refused', agreeing: 'agreeing on keys', none: '–' })[s.seal]],
  ['Memory lent', (s) => `${bytes(s.heldBytes)} of ${bytes(s.pledgedBytes)} used`],
  ['Calls not answered', (s) => count(s.failed)],
  ['All visits: calls · tokens', (s, before) => `${count(before.calls + s.calls)} · ${count(before.tokens + s.tokens)}`],
]);

export class NumbersPanel {
  constructor() {
    this.panel = element('numbers');
    this.big = fill(element('big'), BIG);
    this.details = fill(element('details'), DETAILS);
  }

  /** @param {Status|null} status @param {Work} before */
  show(status, before) {
    this.panel.hidden = status === null;
    const text = (/** @type {Row} */ [, of]) => (status === null ? '–' : of(status, before));
    BIG.forEach((row, i) => say(this.big[i], text(row)));
    DETAILS.forEach((row, i) => say(this.details[i], text(row)));
  }
}

/** @param {Element} list @param {Row[]} rows @returns {HTMLElement[]} */
function fill(list, rows) {
  list.replaceChildren();
  return rows.map(([name]) => {
    const row = make('div');
    const value = make('dd', '–');
    row.append(make('dt', name), value);
    list.append(row);
    return value;
  });
}

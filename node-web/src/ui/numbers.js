/** The numbers panel: what was contributed, measured here and nowhere rounded up. */

import { element, make, say } from './dom.js';
import { bytes, count, milliseconds } from './format.js';

/** @typedef {import('../client.js').Status} Status */

const BIG = /** @type {[string, (s: Status) => string][]} */ ([
  ['calls answered', (s) => count(s.calls)],
  ['rows computed', (s) => count(s.rows)],
  ['layers held', (s) => count(s.layers)],
  ['model data held', (s) => bytes(s.heldBytes)],
]);

const DETAILS = /** @type {[string, (s: Status) => string][]} */ ([
  ['Time per call (median)', (s) => milliseconds(s.medianMs)],
  ['Speed of this device', (s) => (s.gbPerS ? `${s.gbPerS.toFixed(1)} GB/s` : '–')],
  ['Received · sent', (s) => `${bytes(s.bytesIn)} · ${bytes(s.bytesOut)}`],
  ['Path', (s) => (s.path ? `${s.path}${s.rttMs === null ? '' : `, ${milliseconds(s.rttMs)} round trip to the relay`}` : '–')],
  ['Sealed against the relay', (s) => ({ sealed: 'yes', unsealed: 'no', refused: 'refused', agreeing: 'agreeing on keys', none: '–' })[s.seal]],
  ['Memory lent', (s) => `${bytes(s.heldBytes)} of ${bytes(s.pledgedBytes)} used`],
  ['Calls not answered', (s) => count(s.failed)],
]);

export class NumbersPanel {
  constructor() {
    this.panel = element('numbers');
    this.big = fill(element('big'), BIG);
    this.details = fill(element('details'), DETAILS);
  }

  /** @param {Status} status */
  show(status) {
    this.panel.hidden = false;
    BIG.forEach(([, text], i) => say(this.big[i], text(status)));
    DETAILS.forEach(([, text], i) => say(this.details[i], text(status)));
  }
}

/** @param {Element} list @param {[string, unknown][]} rows @returns {HTMLElement[]} */
function fill(list, rows) {
  return rows.map(([name]) => {
    const row = make('div');
    const value = make('dd', '–');
    row.append(make('dt', name), value);
    list.append(row);
    return value;
  });
}

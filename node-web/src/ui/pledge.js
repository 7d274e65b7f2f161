/** The choice of how much memory to lend. */

import { pledges } from '../device.js';
import { recall, remember } from '../identity.js';
import { element, make } from './dom.js';

const KEY = 'pledge-mb';
const UNFINISHED = 'loading';

export class PledgePanel {
  /** @param {import('../device.js').Device} device */
  constructor(device) {
    const { choicesMb, proposedMb } = pledges(device);
    const known = Number(recall(KEY));
    let chosen = choicesMb.includes(known) ? known : proposedMb;
    // A page that ends while loading, without a word, was probably ended for its memory: lend less this time.
    this.reduced = recall(UNFINISHED) === '1' && chosen > choicesMb[0];
    if (this.reduced) chosen = choicesMb[choicesMb.indexOf(chosen) - 1];
    remember(UNFINISHED, '0');
    this.choices = element('choices');
    for (const mb of choicesMb) {
      const label = make('label');
      const input = /** @type {HTMLInputElement} */ (make('input'));
      input.type = 'radio';
      input.name = 'memory';
      input.value = String(mb);
      input.checked = mb === chosen;
      label.append(input, make('span', mb < 1000 ? `${mb} MB` : `${mb / 1000} GB`));
      this.choices.append(label);
    }
  }

  /** Note whether model parts are being loaded, for the next visit to know. @param {boolean} loading */
  mark(loading) {
    const text = loading ? '1' : '0';
    if (recall(UNFINISHED) !== text) remember(UNFINISHED, text);
  }

  /** @returns {number} */
  chosenMb() {
    const input = /** @type {HTMLInputElement|null} */ (this.choices.querySelector('input:checked'));
    const mb = Number(input?.value ?? 64);
    remember(KEY, String(mb));
    return mb;
  }
}

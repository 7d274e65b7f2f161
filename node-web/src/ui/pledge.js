/** The choice of how much memory to lend. */

import { pledges } from '../device.js';
import { recall, remember } from '../identity.js';
import { element, make } from './dom.js';

const KEY = 'pledge-mb';

export class PledgePanel {
  /** @param {import('../device.js').Device} device */
  constructor(device) {
    const { choicesMb, proposedMb } = pledges(device);
    const known = Number(recall(KEY));
    const chosen = choicesMb.includes(known) ? known : proposedMb;
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

  /** @returns {number} */
  chosenMb() {
    const input = /** @type {HTMLInputElement|null} */ (this.choices.querySelector('input:checked'));
    const mb = Number(input?.value ?? 64);
    remember(KEY, String(mb));
    return mb;
  }
}

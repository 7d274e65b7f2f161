/** The choice of how much memory to lend. */

import { pledges } from '../device.js';
import { recall, remember } from '../identity.js';
import { element, make } from './dom.js';

const KEY = 'pledge-mb';

export class PledgePanel {
  /** @param {import('../device.js').Device} device @param {() => void} onChange */
  constructor(device, onChange) {
    const { choicesMb, proposedMb } = pledges(device);
    this.choicesMb = choicesMb;
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
    this.choices.addEventListener('change', onChange);
  }

  get chosenMb() {
    const input = /** @type {HTMLInputElement|null} */ (this.choices.querySelector('input:checked'));
    return Number(input?.value ?? this.choicesMb[0]);
  }

  /** For the next visit. */
  keep() {
    remember(KEY, String(this.chosenMb));
  }

  /** Half as much, for this visit and the next: the last one ended badly. */
  lower() {
    const at = this.choicesMb.indexOf(this.chosenMb);
    const input = /** @type {HTMLInputElement|null} */ (this.choices.querySelector(`input[value="${this.choicesMb[Math.max(0, at - 1)]}"]`));
    if (input !== null) input.checked = true;
    this.keep();
  }
}

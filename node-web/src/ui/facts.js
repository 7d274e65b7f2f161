/** The device panel: what was tested, what is kept, what this browser withholds. */

import { missing } from '../device.js';
import { element, make } from './dom.js';
import { bytes } from './format.js';

/**
 * @typedef {'good'|'warn'|'bad'|''} Mark
 * @typedef {{level: number, charging: boolean}|null} Battery
 * @typedef {{battery: Battery, metered: boolean, awake: boolean}} Surroundings
 * @typedef {import('../client.js').Status} Status
 * @typedef {{lane: string, why: string, age_s: number|null}} Lane
 */

export class FactsPanel {
  /** @param {import('../device.js').Device} device @param {() => void} forget */
  constructor(device, forget) {
    this.device = device;
    this.forget = /** @type {HTMLButtonElement} */ (element('forget'));
    this.forget.addEventListener('click', () => {
      this.forget.disabled = true;
      forget();
    });
    const lacking = missing(device);
    if (lacking !== null) {
      const list = make('ul');
      list.append(...lacking.lacks.map((text) => make('li', text)));
      element('missing').append(make('p', lacking.why), list, make('p', lacking.mend));
      element('missing').hidden = false;
    }
    this.shown = '';
    /** Which lane carries our calls, as the backbone says. @type {Lane|null} */
    this.lane = null;
  }

  /** @param {Status|null} status @param {Surroundings} around */
  show(status, around) {
    const running = status !== null && status.state !== 'CLOSED';
    const facts = [...kernelFacts(status), ...sealFacts(status), ...(running ? laneFacts(this.lane) : []), ...storeFacts(status), ...powerFacts(this.device, around, running)];
    if ((status?.state === 'ASSIGNED' || status?.state === 'GREETED') && status.lastFault) facts.push(['warn', `Last difficulty: ${status.lastFault}`]);
    const text = JSON.stringify(facts);
    if (text === this.shown) return;
    this.shown = text;
    element('facts').replaceChildren(...facts.map(([mark, fact]) => make('li', fact, mark)));
  }

  /** Offer to delete what is kept, while nothing runs. @param {boolean} possible */
  offerForget(possible) {
    this.forget.hidden = !possible;
    if (possible) this.forget.disabled = false;
  }
}

/** @param {Status|null} status @returns {[Mark, string][]} */
function kernelFacts(status) {
  if (status === null) return [['', 'Before it contributes, the device proves with a test that it computes exactly right']];
  if (status.kernelTest === 'failed') return [['bad', 'The arithmetic test failed: this browser must not contribute']];
  if (status.kernelTest === 'untested') return [['', 'The arithmetic test is running']];
  return [['good', `The arithmetic test passed (${status.kernel})`]];
}

/** @param {Lane|null} lane @returns {[Mark, string][]} */
function laneFacts(lane) {
  if (lane === null) return [];
  const age = lane.age_s === null ? 'not measured yet' : `measured ${Math.round(lane.age_s)} s ago`;
  return [['', `Calls take the ${lane.lane} lane: ${lane.why} (${age})`]];
}

/** @param {Status|null} status @returns {[Mark, string][]} */
function sealFacts(status) {
  switch (status?.seal) {
    case 'sealed': return [['good', `Sealed: the relay cannot read what passes. The model’s computer has the key ${status.backbone}`]];
    case 'unsealed': return [['warn', `Not sealed: ${status.sealWhy}. The relay can read what this device is sent and answers`]];
    default: return [];
  }
}

/** @param {Status|null} status @returns {[Mark, string][]} */
function storeFacts(status) {
  if (status === null) return [];
  if (status.storeTrouble === 'stuck') return [['warn', 'The browser’s storage does not answer: model parts stay in memory only']];
  if (status.storeTrouble === 'full') return [['warn', 'Storage is full: model parts stay in memory only and are loaded again next time']];
  if (status.store === 'memory') return [['', 'Model parts stay in memory and are gone when the page closes']];
  if (status.keptBytes === 0) return [['', 'Model parts will be kept on this device for the next visit']];
  return [['good', `${bytes(status.keptBytes)} of model parts kept on this device for the next visit`]];
}

/** @param {import('../device.js').Device} device @param {Surroundings} around @param {boolean} running @returns {[Mark, string][]} */
function powerFacts(device, { battery, metered, awake }, running) {
  /** @type {[Mark, string][]} */
  const facts = [];
  if (battery !== null && !battery.charging) {
    facts.push([battery.level < 0.5 ? 'warn' : '', `On battery (${Math.round(battery.level * 100)} %). Plug in for longer runs`]);
  } else if (battery !== null) {
    facts.push(['good', 'Plugged in']);
  } else if (device.phone) {
    facts.push(['', 'Best while charging: the browser does not tell us the battery’s level']);
  }
  if (metered) facts.push(['warn', 'This connection may cost money by volume: better use Wi-Fi']);
  if (running && awake) facts.push(['good', 'The screen stays on while this page is in front']);
  if (running && !awake && device.phone) facts.push(['warn', 'Keep the screen on and this page in front: the phone stops hidden pages']);
  return facts;
}

/** The device panel: what was tested, who is at the other end, what is kept, what this browser withholds. */

import { missing } from '../device.js';
import { element, make } from './dom.js';
import { bytes } from './format.js';
import { activityOf, difficulty } from './words.js';

/**
 * @typedef {'good'|'warn'|'bad'|''} Mark
 * @typedef {{level: number, charging: boolean}|null} Battery
 * @typedef {{battery: Battery, metered: boolean, awake: boolean}} Surroundings
 * @typedef {import('../client.js').Status} Status
 * @typedef {{lane: string, why: string, age_s: number|null, model?: string|null}} Lane
 * @typedef {import('./view.js').Facts} Facts
 */

export class FactsPanel {
  /** @param {import('../device.js').Device} device */
  constructor(device) {
    const lacking = missing(device);
    if (lacking !== null) {
      const list = make('ul');
      list.append(...lacking.lacks.map((text) => make('li', text)));
      element('missing').replaceChildren(make('p', lacking.why), list, make('p', lacking.mend));
      element('missing').hidden = false;
    }
    this.shown = '';
    element('device').hidden = false;
  }

  /** @param {Facts} facts */
  show(facts) {
    const lines = factLines(facts);
    const text = JSON.stringify(lines);
    if (text === this.shown) return;
    this.shown = text;
    element('facts').replaceChildren(...lines.map(([mark, line]) => make('li', line, mark)));
  }
}

/** Every line, from nothing but the facts. @param {Facts} facts @returns {[Mark, string][]} */
export function factLines({ device, status, around, hold, lane, keptBytes, goneBytes }) {
  const running = status !== null && status.state !== 'CLOSED';
  const paired = running && status.paired && activityOf(status, hold) !== 'connecting';
  return [
    ...kernelFacts(running ? status : null),
    ...(running ? sealFacts(status) : []),
    ...(paired ? laneFacts(lane) : []),
    ...storeFacts(running ? status : null, keptBytes, goneBytes),
    ...powerFacts(device, around, running),
    ...(running && hasTrouble(status) ? [/** @type {[Mark, string]} */ (['warn', `Last difficulty: ${difficulty(status.lastFaultCode)}`])] : []),
  ];
}

/** What failed is told while it matters: until all is loaded. @param {Status} status */
function hasTrouble(status) {
  return status.lastFault !== '' && (status.state === 'GREETED' || (status.paired && status.loaded < status.wanted));
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
  /** @type {[Mark, string][]} */
  const model = lane.model ? [['', `The model is ${lane.model}`]] : [];
  return [...model, ['', `Calls take the ${lane.lane} lane: ${lane.why} (${age})`]];
}

/** @param {Status} status @returns {[Mark, string][]} */
function sealFacts(status) {
  switch (status.seal) {
    case 'sealed': return [['good', `Sealed: the relay cannot read what passes. The model’s computer has the key ${status.backbone}`]];
    case 'unsealed': return [['warn', `Not sealed: ${status.sealWhy}. The relay can read what this device is sent and answers`]];
    default: return [];
  }
}

/** @param {Status|null} status @param {number} keptBytes @param {number} goneBytes @returns {[Mark, string][]} */
function storeFacts(status, keptBytes, goneBytes) {
  /** @type {[Mark, string][]} */
  const gone = goneBytes > 0 ? [['good', `${bytes(goneBytes)} of model parts were deleted from this device`]] : [];
  /** @type {[Mark, string][]} */
  const kept = keptBytes > 0 ? [['good', `${bytes(keptBytes)} of model parts kept on this device for the next visit`]] : [];
  if (status === null) return [...gone, ...kept];
  if (status.storeTrouble === 'stuck') return [...gone, ['warn', 'The browser’s storage does not answer: model parts stay in memory only']];
  if (status.storeTrouble === 'full') return [...gone, ...kept, ['warn', 'Storage is full: other model parts stay in memory only and are loaded again next time']];
  if (status.store === 'memory') return [['', 'Model parts stay in memory and are gone when the page closes']];
  if (!kept.length && !gone.length) return [['', 'Model parts will be kept on this device for the next visit']];
  return [...gone, ...kept];
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

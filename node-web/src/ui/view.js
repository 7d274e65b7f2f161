/** Everything the page shows, written anew from its facts: nothing stays of what was true before. */

import { MB } from '../device.js';
import { element, focusable, say } from './dom.js';
import { FactsPanel } from './facts.js';
import { bytes, plural } from './format.js';
import { NumbersPanel } from './numbers.js';
import { pauseLabel, words } from './words.js';

/**
 * @typedef {{calls: number, rows: number, tokens: number}} Work
 * @typedef {{models: {name: string, size_bytes: number, nodes: number}[]}} Offer  what the relay says before one joins
 *
 * @typedef {object} Facts
 * @property {import('../device.js').Device} device
 * @property {import('../client.js').Status|null} status
 * @property {boolean} running  the worker is there
 * @property {boolean} failed  it crashed
 * @property {import('../holds.js').Hold} hold
 * @property {import('./facts.js').Surroundings} around
 * @property {import('./facts.js').Lane|null} lane
 * @property {Offer|null} offer
 * @property {Work} before  by former visits
 * @property {number} keptBytes
 * @property {number} goneBytes
 * @property {boolean} deleting
 * @property {boolean} asking  whether it may begin on a line that costs money
 * @property {boolean} leaving  the owner pressed Stop
 * @property {number} chosenMb
 * @property {string} notice
 */

/** @type {import('./words.js').Words} */
const WELCOME = {
  activity: 'left', link: '', linkText: 'not connected', progress: null,
  headline: 'Lend this device to a language model',
  detail: 'While this page is open, your device computes a small part of each answer. Nothing is installed, and you can stop at any time.',
};
/** @type {import('./words.js').Words} */
const STARTING = { activity: 'connecting', link: 'wait', linkText: 'starting', progress: null, headline: 'Starting…', detail: 'Looking at what is kept here.' };

/** Where the focus goes when what had it is gone: the first of these that is there. */
const NEXT = ['ask-yes', 'pause', 'start', 'forget', 'headline'];

export class View {
  /** @param {import('../device.js').Device} device */
  constructor(device) {
    this.facts = new FactsPanel(device);
    this.numbers = new NumbersPanel();
  }

  /** @param {Facts} facts */
  show(facts) {
    const focused = /** @type {HTMLElement|null} */ (document.activeElement);
    const said = facts.status !== null ? words(facts.status, facts.hold) : facts.running ? STARTING : WELCOME;
    this.#say(said, facts);
    this.#controls(facts);
    this.#progress(said.progress);
    this.numbers.show(facts.status, facts.before);
    this.facts.show(facts);
    forget(facts);
    mark(said, facts);
    if (focused !== null && focused !== document.body && !focusable(focused)) {
      NEXT.map((id) => element(id)).find(focusable)?.focus();
    }
  }

  /** @param {import('./words.js').Words} said @param {Facts} facts */
  #say({ headline, detail, linkText, link }, facts) {
    say(element('headline'), headline);
    say(element('detail'), detail);
    say(element('link-text'), linkText);
    document.body.dataset.link = link;
    document.title = facts.running ? `${linkText} · expertswarm` : 'expertswarm · lend this device';
    element('notice').hidden = facts.notice === '';
    say(element('notice'), facts.notice);
    element('offer').hidden = facts.running || facts.offer === null;
    say(element('offer'), facts.offer === null ? '' : offerText(facts.offer));
    say(element('cost'), costText(facts));
    say(element('ask-text'), `This connection may cost money by volume: up to ${bytes(toLoad(facts))} of model parts would be loaded over it, and each call carries some kilobytes.`);
  }

  /** @param {Facts} facts */
  #controls({ running, asking, hold, leaving, device }) {
    element('pledge').hidden = running || asking;
    element('ask').hidden = running || !asking;
    element('controls').hidden = !running;
    say(element('pause'), pauseLabel(hold));
    element('leave').setAttribute('aria-disabled', String(leaving));
    /** @type {HTMLButtonElement} */ (element('start')).disabled = !device.workers;
  }

  /** @param {number|null} progress */
  #progress(progress) {
    const bar = element('progress');
    bar.hidden = progress === null;
    bar.setAttribute('aria-valuenow', String(Math.round((progress ?? 0) * 100)));
    element('progress-fill').style.transform = `scaleX(${progress ?? 0})`;
  }
}

/** @param {Facts} facts */
function forget({ keptBytes, deleting }) {
  const button = element('forget');
  button.hidden = keptBytes === 0 && !deleting;
  button.setAttribute('aria-disabled', String(deleting));
  say(button, deleting ? 'Deleting…' : `Delete kept model parts (${bytes(keptBytes)})`);
}

/** For tests, and for whoever styles the page. @param {import('./words.js').Words} said @param {Facts} facts */
function mark({ activity }, { status, running, failed, hold }) {
  const { dataset } = document.body;
  dataset.state = failed ? 'failed' : status?.state.toLowerCase() ?? (running ? 'starting' : 'idle');
  dataset.activity = status === null ? '' : activity;
  dataset.hold = hold ?? '';
  dataset.calls = String(status?.calls ?? 0);
  dataset.layers = String(status?.layers ?? 0);
  dataset.seal = status?.seal ?? 'none';
  dataset.backbone = status?.backbone ?? '';
  dataset.kernel = status === null ? 'untested' : status.kernelTest === 'passed' ? status.kernel : status.kernelTest;
}

/** The most that may still have to be loaded. @param {Facts} facts */
export function toLoad({ chosenMb, keptBytes, offer }) {
  const models = offer?.models ?? [];
  const mostBytes = models.length ? Math.max(...models.map((model) => model.size_bytes)) : Infinity;
  return Math.max(0, Math.min(chosenMb * MB, mostBytes) - keptBytes);
}

/** @param {Facts} facts */
function costText(facts) {
  const load = toLoad(facts);
  const once = load > 0 ? `Loads up to ${bytes(load)} once` : 'Loads nothing more';
  return `${once}, then some kilobytes for each call. The processor works only while somebody asks.`;
}

/** @param {Offer} offer */
function offerText({ models }) {
  const { host } = location;
  if (!models.length) return `No model is at ${host} just now. This device would wait for one.`;
  const named = models.map(({ name, size_bytes: size, nodes }) => `${name} (${bytes(size)} to share, ${nodes ? plural(nodes, 'device') : 'no device yet'})`);
  return `At ${host}: ${named.join('; ')}.`;
}

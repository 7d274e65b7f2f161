/**
 * Remember how the page's runs ended: whether one may begin by itself, and with how much memory.
 *
 * A run writes a mark when it begins and takes it away when it ends or the page is left. A mark without a run is a
 * crash; browsers end a page that takes too much memory without a word. After one the next run lends less, after two
 * its owner is asked. Pure but for the notes it is given.
 */

export const MOST_CRASHES = 2; // then nothing begins by itself
export const SETTLED_MS = 600_000; // a run that lasted this long makes up for those that did not
export const BEAT_MS = 5000; // a mark is renewed; where the browser has no locks, an old one tells of a crash

const MARKS = 'runs';
const CRASHES = 'crashes';
const AGREED = 'agreed'; // the owner pressed Start here, and not Stop since
const WORKING = 'working'; // this tab was at work: a reload goes on

/**
 * @typedef {{get: (key: string) => string|null, set: (key: string, value: string) => void}} Notes
 */

export class Runs {
  /**
   * @param {Notes} device  outlives the tab
   * @param {Notes} tab  ends with it
   * @param {string} id  of this page
   */
  constructor(device, tab, id) {
    this.device = device;
    this.tab = tab;
    this.id = id;
  }

  /** @returns {Record<string, number>} run -> when its mark was renewed */
  get marks() {
    try {
      const marks = JSON.parse(this.device.get(MARKS) ?? '{}');
      return typeof marks === 'object' && marks !== null ? marks : {};
    } catch {
      return {};
    }
  }

  get crashes() {
    return Number(this.device.get(CRASHES)) || 0;
  }

  get agreed() {
    return this.device.get(AGREED) === '1';
  }

  /** Find runs that crashed since the last look. @param {Set<string>|null} alive  runs of other tabs; null: nobody can tell @param {number} now ms @returns {boolean} */
  look(alive, now) {
    const marks = this.marks;
    const own = this.tab.get(WORKING);
    const dead = Object.keys(marks).filter((run) => run !== this.id
      && (alive !== null ? !alive.has(run) : run === own || !(now - marks[run] < 3 * BEAT_MS)));
    if (!dead.length) return false;
    for (const run of dead) delete marks[run];
    this.device.set(MARKS, JSON.stringify(marks));
    this.device.set(CRASHES, String(this.crashes + 1));
    return true;
  }

  /** What to do when the page opens. `asked`: its address wants a start. @param {boolean} asked @param {boolean} [agreed] @returns {'start'|'ask'|'crashed'|'wait'} */
  plan(asked, agreed = this.agreed) {
    const wanted = this.tab.get(WORKING) !== null && this.tab.get(WORKING) !== '';
    if (!wanted && !asked) return 'wait';
    if (this.crashes >= MOST_CRASHES) return 'crashed';
    return wanted || agreed || this.agreed ? 'start' : 'ask';
  }

  /** The owner pressed Start. */
  agree() {
    this.device.set(AGREED, '1');
  }

  /** A run begins, or goes on. @param {number} now ms */
  begin(now) {
    this.device.set(MARKS, JSON.stringify({ ...this.marks, [this.id]: now }));
    this.tab.set(WORKING, this.id);
  }

  /** The page is left; if it is loaded again in this tab, it goes on. */
  left() {
    const marks = this.marks;
    delete marks[this.id];
    this.device.set(MARKS, JSON.stringify(marks));
  }

  /** The run ended as it should. @param {boolean} byOwner */
  ended(byOwner) {
    this.left();
    this.tab.set(WORKING, '');
    if (!byOwner) return;
    this.device.set(AGREED, '');
    this.device.set(CRASHES, '0');
  }

  /** The page's worker crashed, and the page is still there to tell. */
  failed() {
    this.ended(false);
    this.device.set(CRASHES, String(this.crashes + 1));
  }

  /** The run lasted. */
  settled() {
    this.device.set(CRASHES, '0');
  }
}

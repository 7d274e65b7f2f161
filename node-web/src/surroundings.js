/** Battery, metered connection and wake lock, where the browser has them; tells when they change. */

/** @typedef {import('./ui/facts.js').Surroundings} Surroundings */

export class SurroundingsWatch {
  /** @param {() => void} onChange */
  constructor(onChange) {
    /** @type {Surroundings} */
    this.now = { battery: null, metered: false, awake: false };
    this.onChange = onChange;
    this.wanted = false;
    /** @type {any} */
    this.lock = null;
    const connection = /** @type {any} */ (navigator).connection;
    const look = () => {
      this.now.metered = connection?.saveData === true || connection?.type === 'cellular';
      onChange();
    };
    connection?.addEventListener?.('change', look);
    if (connection) this.now.metered = connection.saveData === true || connection.type === 'cellular';
    this.watchBattery();
  }

  /** For the Offer. */
  power() {
    return { battery: this.now.battery?.level ?? null, metered: this.now.metered };
  }

  async watchBattery() {
    try {
      const battery = await /** @type {any} */ (navigator).getBattery();
      const look = () => {
        this.now.battery = { level: battery.level, charging: battery.charging };
        this.onChange();
      };
      battery.addEventListener('levelchange', look);
      battery.addEventListener('chargingchange', look);
      look();
    } catch {
      // Safari and Firefox do not tell, and plain http pages are not told.
    }
  }

  /** Keep the screen on, or no longer. The browser takes the lock away when the page is hidden: ask again then. @param {boolean} wanted */
  async keepAwake(wanted) {
    this.wanted = wanted;
    const wakeLock = /** @type {any} */ (navigator).wakeLock;
    try {
      if (!wanted) await this.lock?.release();
      else if (wakeLock && document.visibilityState === 'visible' && this.lock === null) {
        const lock = await wakeLock.request('screen');
        this.lock = lock;
        lock.addEventListener('release', () => {
          this.lock = null;
          this.now.awake = false;
          this.onChange();
        });
      }
    } catch {
      // Low battery, or not allowed: the page says that the screen should stay on.
    }
    this.now.awake = this.lock !== null;
    this.onChange();
  }
}

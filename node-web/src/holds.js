/** Decide whether this device must hold back: for its owner, its battery, or a line that costs money. Pure. */

export const LOW_LEVEL = 0.15; // from here down a phone needs what is left for itself
export const ENOUGH_LEVEL = 0.25; // to go on without a charger; the gap keeps it from going to and fro

/**
 * @typedef {'owner'|'battery'|'metered'|null} Hold  why nothing is computed and loaded
 * @typedef {{paused: boolean, lowBattery: boolean, metered: boolean}} Wishes  what the owner said: pause; go on although …
 */

/**
 * @param {{battery: {level: number, charging: boolean}|null, metered: boolean}} around
 * @param {Wishes} wishes
 * @param {Hold} before
 * @returns {Hold}
 */
export function holdFor({ battery, metered }, wishes, before) {
  if (wishes.paused) return 'owner';
  const least = before === 'battery' ? ENOUGH_LEVEL : LOW_LEVEL;
  if (battery !== null && !battery.charging && battery.level <= least && !wishes.lowBattery) return 'battery';
  return metered && !wishes.metered ? 'metered' : null;
}

/** What the owner wants after pressing the button that says Pause, or that it goes on all the same. @param {Hold} hold @param {Wishes} wishes @returns {Wishes} */
export function pressed(hold, wishes) {
  switch (hold) {
    case null: return { ...wishes, paused: true };
    case 'owner': return { ...wishes, paused: false };
    case 'battery': return { ...wishes, lowBattery: true };
    case 'metered': return { ...wishes, metered: true };
  }
}

/** Write numbers for people: three significant digits, honest units. Pure. */

/** @param {number} value @returns {string} */
export function count(value) {
  if (value < 100_000) return Math.round(value).toLocaleString('en');
  return value < 1e6 ? `${Math.floor(value / 1e3)}k` : `${(Math.floor(value / 1e4) / 100).toFixed(2)}M`;
}

/** Decimal units, as phones and shops count. @param {number} value @returns {string} */
export function bytes(value) {
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toPrecision(2 + Number(value >= 10))}\u00a0${units[unit]}`; // the number and its unit stay on one line
}

/** @param {number|null} value @returns {string} */
export function milliseconds(value) {
  if (value === null) return '–';
  if (value <= 0.1) return 'at most 0.1\u00a0ms'; // browsers do not let pages measure finer
  return `${value >= 100 ? Math.round(value) : value.toPrecision(2)}\u00a0ms`;
}

/** @param {number} value @param {string} one @param {string} [many] */
export function plural(value, one, many = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : many}`;
}

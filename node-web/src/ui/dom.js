/** The three lines of DOM handling the panels share. */

/** @template {HTMLElement} T @param {string} id @returns {T} */
export function element(id) {
  return /** @type {T} */ (document.getElementById(id));
}

/** Write only what changed, so that screen readers are not told the same again. @param {Element} node @param {string} text */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** @param {string} tag @param {string} [text] @param {string} [className] */
export function make(tag, text = '', className = '') {
  const node = document.createElement(tag);
  if (text) node.textContent = text;
  if (className) node.className = className;
  return node;
}

/** Whether an element is there and could have the focus. @param {HTMLElement} node @returns {boolean} */
export function focusable(node) {
  return node.isConnected && node.closest('[hidden]') === null && !(/** @type {HTMLButtonElement} */ (node).disabled);
}

/** Say how things stand in words a stranger understands. Pure: a status in, sentences out. */

import { bytes, plural } from './format.js';

/**
 * @typedef {import('../client.js').Status} Status
 * @typedef {{headline: string, detail: string, link: 'up'|'wait'|'down'|'', linkText: string, progress: number|null}} Words
 */

/** @param {Status} status @returns {Words} */
export function words(status) {
  const { wanted, loaded } = status;
  if (status.seal === 'refused' && status.state === 'OFFERED') {
    return { headline: 'Not contributing', detail: `This page’s address names the key of the only computer to work for: ${sentence(status.sealWhy)}.`, link: 'wait', linkText: 'connected, idle', progress: null };
  }
  switch (status.state) {
    case 'CONNECTING': {
      const again = status.reason ? `The relay cannot be reached (${sentence(status.reason)}). Trying again by itself; what was loaded is kept.` : 'Looking for the relay.';
      return { headline: 'Connecting…', detail: again, link: 'wait', linkText: 'connecting', progress: null };
    }
    case 'GREETED':
      return { headline: 'Checking this device…', detail: 'A short test makes sure that this device computes exactly right.', link: 'up', linkText: 'connected', progress: null };
    case 'OFFERED':
      return { headline: 'Ready to help', detail: 'Connected. The relay will send parts of a model as soon as one needs this device.', link: 'up', linkText: 'connected', progress: null };
    case 'ASSIGNED':
      return { headline: 'Loading parts of the model…', detail: `${loaded} of ${wanted} parts are here. Those that are here already work.`, link: 'up', linkText: 'connected', progress: loaded / Math.max(1, wanted) };
    case 'SERVING':
      return { headline: 'Contributing', detail: `This device holds ${plural(status.experts, 'part')} of the model in ${plural(status.layers, 'layer')} (${bytes(status.heldBytes)}).`, link: 'up', linkText: 'connected', progress: null };
    case 'PAUSED':
      return { headline: 'Paused', detail: 'Nothing is computed here until you resume. What was loaded is kept.', link: 'up', linkText: 'connected, paused', progress: null };
    case 'ASLEEP':
      return { headline: 'Asleep', detail: 'The browser put this page to sleep. It goes on when the page is back in front.', link: 'down', linkText: 'asleep', progress: null };
    case 'DRAINING':
      return { headline: 'Finishing…', detail: 'The last accepted calls are being answered.', link: 'up', linkText: 'leaving', progress: null };
    case 'CLOSED':
      if (status.reason === 'left') return { headline: 'Thank you', detail: 'This device no longer contributes. You may close the page, or start again.', link: '', linkText: 'not connected', progress: null };
      return { headline: 'Stopped', detail: `${capital(sentence(status.reason))}.`, link: 'down', linkText: 'not connected', progress: null };
  }
}

/** @param {string} text */
function sentence(text) {
  return text.trim().replace(/\.+$/, '');
}

/** @param {string} text */
function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

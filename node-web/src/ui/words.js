/** Say how things stand in words a stranger understands. Pure: facts in, sentences out. */

import { bytes, plural } from './format.js';

export const HELPING_S = 10; // after so long without a call the device is idle

/**
 * @typedef {import('../client.js').Status} Status
 * @typedef {import('../holds.js').Hold} Hold
 * @typedef {'connecting'|'checking'|'refused'|'waiting'|'spare'|'loading'|'helping'|'idle'|'paused'|'battery'|'metered'|'asleep'|'leaving'|'left'|'stopped'} Activity
 * @typedef {'up'|'wait'|'down'|''} Light
 * @typedef {{activity: Activity, headline: string, detail: string, link: Light, linkText: string, progress: number|null}} Words
 */

/** What this device does just now, by the facts alone. @param {Status} status @param {Hold} [hold] @returns {Activity} */
export function activityOf(status, hold = null) {
  switch (status.state) {
    case 'CLOSED': return status.reason === 'left' ? 'left' : 'stopped';
    case 'CONNECTING': return 'connecting';
    case 'GREETED': return 'checking';
    case 'ASLEEP': return 'asleep';
    case 'DRAINING': return 'leaving';
    case 'PAUSED': return hold === 'battery' || hold === 'metered' ? hold : 'paused';
    default: // OFFERED, ASSIGNED, SERVING: who is at the other end, and what came of it?
  }
  if (status.seal === 'refused') return 'refused';
  if (!status.paired) return 'waiting';
  if (status.wanted === 0) return 'spare';
  if (status.loaded < status.wanted) return 'loading';
  return isCalled(status) ? 'helping' : 'idle';
}

/** @param {Status} status */
function isCalled({ sinceCallS }) {
  return sinceCallS !== null && sinceCallS < HELPING_S;
}

/** @param {Status} status @param {Hold} [hold] @returns {Words} */
export function words(status, hold = null) {
  const activity = activityOf(status, hold);
  const progress = activity === 'loading' ? status.loaded / status.wanted : null;
  const holds = `It holds ${plural(status.experts, 'part')} of the model in ${plural(status.layers, 'layer')} (${bytes(status.heldBytes)}).`;
  const kept = status.heldBytes > 0 ? ' What was loaded is kept.' : '';
  return { activity, progress, ...said() };

  /** @returns {{headline: string, detail: string, link: Light, linkText: string}} */
  function said() {
    switch (activity) {
      case 'connecting': {
        const again = status.reason ? `No connection to the relay: ${sentence(status.reason)}. Trying again by itself.${kept}` : 'Looking for the relay.';
        return { headline: 'Connecting…', detail: again, link: 'wait', linkText: 'connecting' };
      }
      case 'checking':
        return { headline: 'Checking this device…', detail: 'A short test makes sure that this device computes exactly right.', link: 'wait', linkText: 'connected' };
      case 'refused':
        return { headline: 'Not contributing', detail: `This page’s address names the key of the only computer to work for: ${sentence(status.sealWhy)}.`, link: 'wait', linkText: 'connected, idle' };
      case 'waiting':
        return { headline: 'Waiting for a model', detail: `Connected to the relay, but no computer with a model is there just now. It goes on by itself when one comes.${kept}`, link: 'wait', linkText: 'no model there' };
      case 'spare':
        return { headline: 'Ready to help', detail: 'The model is there and does without this device just now. Its parts come as soon as they are needed here.', link: 'wait', linkText: 'not needed now' };
      case 'loading':
        return { headline: 'Loading parts of the model…', detail: `${status.loaded} of ${status.wanted} parts are here. Those that are here already work.`, link: 'up', linkText: isCalled(status) ? 'helping' : 'loading' };
      case 'helping':
        return { headline: 'Contributing', detail: `This device is computing parts of answers now. ${holds}`, link: 'up', linkText: 'helping' };
      case 'idle':
        return { headline: 'Ready, nobody asks just now', detail: `This device helps as soon as somebody asks the model. ${holds}`, link: 'up', linkText: 'idle' };
      case 'paused':
        return { headline: 'Paused', detail: `Nothing is computed or loaded here until you resume.${kept}`, link: 'wait', linkText: 'paused' };
      case 'battery':
        return { headline: 'Paused: the battery is low', detail: `Nothing is computed or loaded here. It goes on by itself when the device is charging.${kept}`, link: 'wait', linkText: 'paused' };
      case 'metered':
        return { headline: 'Paused: this connection may cost money', detail: `Nothing is computed or loaded here: up to ${bytes(Math.max(0, status.pledgedBytes - status.heldBytes))} may have to be loaded, and each call carries some kilobytes. It goes on by itself on another connection.${kept}`, link: 'wait', linkText: 'paused' };
      case 'asleep':
        return { headline: 'Asleep', detail: 'The browser put this page to sleep. It goes on when the page is back in front.', link: 'down', linkText: 'asleep' };
      case 'leaving':
        return { headline: 'Finishing…', detail: 'The last accepted calls are being answered.', link: 'wait', linkText: 'leaving' };
      case 'left':
        return { headline: 'Thank you', detail: 'This device no longer contributes. You may close the page, or start again.', link: '', linkText: 'not connected' };
      case 'stopped':
        return { headline: 'Stopped', detail: `${capital(sentence(status.reason))}.`, link: 'down', linkText: 'not connected' };
    }
  }
}

/** What the button beside “Stop and leave” says. @param {Hold} hold */
export function pauseLabel(hold) {
  switch (hold) {
    case null: return 'Pause';
    case 'owner': return 'Resume';
    default: return 'Go on all the same';
  }
}

/** The kinds of difficulty a person may be told of. @type {Map<string, string>} */
const DIFFICULTIES = new Map(Object.entries({
  slice_fault: 'a part of the model could not be loaded; it is tried again',
  unreachable: 'the relay could not be reached for a moment; it is tried again',
  kernel_fault: 'a computation failed; the device is tested again',
  bad_seal: 'a message could not be unsealed; it is asked again elsewhere',
  not_served: 'this browser cannot compute some layers of this model; others do',
}));

/** @param {string} code @returns {string} */
export function difficulty(code) {
  return DIFFICULTIES.get(code) ?? 'a call could not be answered; it is asked again elsewhere';
}

/** @param {string} text */
function sentence(text) {
  return text.trim().replace(/\.+$/, '');
}

/** @param {string} text */
function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

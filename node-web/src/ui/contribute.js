/** The upper panel: how things stand, and the buttons. */

import { element, say } from './dom.js';
import { words } from './words.js';

/**
 * @typedef {object} Actions
 * @property {(memoryMb: number) => void} start
 * @property {(paused: boolean) => void} pause
 * @property {() => void} leave
 */

export class ContributePanel {
  /** @param {Actions} actions @param {import('./pledge.js').PledgePanel} pledge */
  constructor(actions, pledge) {
    this.paused = false;
    this.form = element('pledge');
    this.controls = element('controls');
    this.pauseButton = element('pause');
    this.leaveButton = /** @type {HTMLButtonElement} */ (element('leave'));
    this.form.addEventListener('submit', (event) => {
      event.preventDefault();
      actions.start(pledge.chosenMb());
    });
    this.pauseButton.addEventListener('click', () => actions.pause(!this.paused));
    this.leaveButton.addEventListener('click', () => {
      this.leaveButton.disabled = true;
      actions.leave();
    });
  }

  /** @param {import('../client.js').Status} status */
  show(status) {
    const { headline, detail, link, linkText, progress } = words(status);
    say(element('headline'), headline);
    say(element('detail'), detail);
    say(element('link-text'), linkText);
    document.body.dataset.link = link;
    const bar = element('progress');
    bar.hidden = progress === null;
    if (progress !== null) {
      bar.setAttribute('aria-valuenow', String(Math.round(progress * 100)));
      element('progress-fill').style.transform = `scaleX(${progress})`;
    }
    const closed = status.state === 'CLOSED';
    this.paused = status.state === 'PAUSED';
    say(this.pauseButton, this.paused ? 'Resume' : 'Pause');
    this.pauseButton.setAttribute('aria-pressed', String(this.paused));
    this.running(!closed);
  }

  /** @param {boolean} running */
  running(running) {
    const focused = document.activeElement;
    this.form.hidden = running;
    this.controls.hidden = !running;
    if (running && focused?.id === 'start') this.pauseButton.focus();
    if (!running) {
      this.leaveButton.disabled = false;
      if (focused === this.leaveButton) element('start').focus();
    }
  }

  /** What cannot go on by itself. @param {string} text */
  warn(text) {
    const notice = element('notice');
    notice.hidden = text === '';
    say(notice, text);
  }
}

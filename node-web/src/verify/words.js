/** Say what a check found. Pure: a report in, sentences and rows out. */

import { bytes, plural } from '../ui/format.js';

/**
 * What wasm/pyodide's check.py reports.
 * @typedef {{
 *   agree: boolean, facts: Record<string, any>, wrong_slices: number[], differing: number, compared: number,
 *   differences: [number, number, number, number][], worst: number, error: string,
 * }} Report
 * @typedef {{verdict: 'agree'|'differ'|'unread', title: string, detail: string}} Verdict
 */

export const STEPS = /** @type {const} */ ([
  ['python', 'Load Python (Pyodide)'],
  ['kernel', 'Load codec and kernel'],
  ['check', 'Test the kernel, compute the call again'],
]);
const TOLERANCE = 2 ** -8; // wasm/CONTRACT.md, "WebGPU"

/** @param {Report} report @returns {Verdict} */
export function verdict(report) {
  if (report.error) return { verdict: 'unread', title: 'This file cannot be checked', detail: `${report.error}.` };
  if (report.wrong_slices.length) {
    return {
      verdict: 'differ', title: 'These are other weights',
      detail: `The bytes of ${plural(report.wrong_slices.length, 'expert')} (${report.wrong_slices.join(', ')}) do not have the hash they were recorded with. ${outcome(report)}`,
    };
  }
  if (report.agree) {
    return { verdict: 'agree', title: 'The bytes agree', detail: `All ${report.compared} channels are, bit for bit, what this browser computed. Each expert's bytes have the hash they were recorded with.` };
  }
  const graphics = report.facts.node?.kernel === 'webgpu';
  const allowed = graphics ? ` A graphics device may be off by ${TOLERANCE}: this one is ${report.worst <= TOLERANCE ? 'within that' : 'beyond that'}.` : ' No kernel of this class may be off by anything.';
  return { verdict: 'differ', title: 'The bytes differ', detail: outcome(report) + allowed };
}

/** @param {Report} report */
function outcome({ differing, compared, worst }) {
  if (!differing) return 'The answer follows from them, though.';
  return `${differing} of ${plural(compared, 'channel')} have another value than was answered; the largest difference is ${worst.toPrecision(2)} of its row's largest output.`;
}

/** Facts as pairs of name and value. @param {Report} report @returns {[string, string, string?][]} */
export function facts({ facts: found }) {
  if (!found.model) return [];
  const { node, formula } = found;
  return [
    ['Model', found.model],
    ['Layer, experts', `${found.layer}; ${found.experts.join(', ')}`],
    ['Rows, picks', `${found.rows}, ${found.picks}`],
    ['Expert', `${formula.hidden_dim} × ${formula.expert_dim}, ${formula.activation}`],
    ['Answered by', `${node.name} (${node.kernel})`],
    ['Recorded', found.recorded_at.replace('T', ' ').replace('+00:00', ' UTC')],
    ['Request, answer, weights', [found.request_bytes, found.answer_bytes, found.slice_bytes].map(bytes).join(', ')],
    ['Computed here by', `${found.build}, in Pyodide`],
    ['Answered bytes', found.answer_sha256 ?? '', 'hash'],
    ['Recomputed bytes', found.recomputed_sha256 ?? '', 'hash'],
  ];
}

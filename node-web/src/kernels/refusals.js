/** What the error numbers of wasm/expert.h mean here. */
import { CallRefused, KernelFault } from '../errors.js';

/** enum expert_error, as Failure codes and words */
const ERRORS = /** @type {Record<number, [string, string]>} */ ({
  [-1]: ['non_finite', 'an infinity or NaN in weights, activations or outputs'],
  [-2]: ['grid_overflow', 'an output does not fit the integer grid'],
  [-3]: ['bad_frame', 'a dimension is no multiple of its block, or a buffer has the wrong length'],
  [-4]: ['bad_frame', 'weight format not supported yet'],
  [-5]: ['bad_frame', 'formula not supported yet'],
  [-6]: ['bad_frame', 'a pick names an expert that was not passed'],
  [-7]: ['bad_frame', 'x is in int8 blocks of another size than gate or up want; send f32 or f16'],
  [-8]: ['bad_frame', 'a value out of range (an activation of -128, a scale below 0, an exponent, an unknown encoding or grid)'],
  [-9]: ['bad_frame', 'an expert was packed for another formula'],
  [-10]: ['kernel_fault', 'scratch memory too small'],
  [-11]: ['kernel_fault', 'the known-answer test gave another answer; this device must not serve'],
});

/** Throws CallRefused or KernelFault for a negative code. @param {number} code @param {string} what @returns {number} the code when it is none of an error */
export function check(code, what) {
  if (code >= 0) return code;
  const [name] = ERRORS[code] ?? ['kernel_fault', ''];
  if (name === 'kernel_fault') throw new KernelFault(`${what}: ${describe(code)}`);
  throw new CallRefused(name, `${what}: ${describe(code)}`);
}

/** @param {number} code */
export function describe(code) {
  return ERRORS[code]?.[1] ?? `error ${code}`;
}

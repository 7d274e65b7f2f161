// Points of the grids of the IQ formats, one byte per column: grids.js. Where each begins, in words:
const IQ1 = 0u;       // 2048 points of 8 columns, 8 * level + 129
const IQ2_XXS = 4096u;   // 256 of 8, levels without signs
const IQ2_XS = 4608u;    // 512 of 8
const IQ2_S = 5632u;     // 1024 of 8
const IQ3_XXS = 7680u;   // 256 of 4
const IQ3_S = 7936u;     // 512 of 4
@group(0) @binding(8) var<storage, read> grids: array<u32>;

// Negate byte i where bit i is set; no byte is 0.
fn with_signs(levels: u32, bits: u32) -> u32 {
  let ones = spread(bits, 0u);
  return (levels ^ (ones * 255u)) + ones;
}
// Seven sign bits and the eighth, which makes their number even.
fn eight_signs(bits: u32) -> u32 {
  let seven = bits & 127u;
  return seven | ((countOneBits(seven) & 1u) << 7u);
}
// Half a point of IQ1 in eighths: 8 * level + 1, or - 1 with a negative delta.
fn iq1_levels(point: u32, half: u32, minus: u32) -> u32 {
  return (grids[IQ1 + 2u * point + half] - select(0u, 0x02020202u, minus != 0u)) ^ 0x80808080u;
}

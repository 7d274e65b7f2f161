// Q4_K, 256 columns in 144 bytes: d, dmin f16 at 0, scales and minimums at 4, nibbles at 16.
const $COLS = 256u;
const $BYTES = 144u;
fn $unpack(block: u32, j: u32) {
  let nibbles = block + 16u + 32u * (j >> 1u);
  for (var i = 0u; i < 8u; i++) { $q[i] = ($word(nibbles + 4u * i) >> (4u * (j & 1u))) & 0x0f0f0f0fu; }
  $scale_and_minimum(block + 4u, j);
}
fn $sub(x: u32) -> vec2<i32> {
  return vec2<i32>($scales.x * $dots(x, 0u, 8u), $scales.y * $sum(x, 0u, 8u));
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {
  return ($half(block) * dx) * i - ($half(block + 2u) * dx) * m;
}

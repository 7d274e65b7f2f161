// Q5_K, 256 columns in 176 bytes: as Q4_K, with 32 bytes of fifth bits at 16 and the nibbles at 48.
const $COLS = 256u;
const $BYTES = 176u;
fn $unpack(block: u32, j: u32) {
  let nibbles = block + 48u + 32u * (j >> 1u);
  for (var i = 0u; i < 8u; i++) {
    let low = ($word(nibbles + 4u * i) >> (4u * (j & 1u))) & 0x0f0f0f0fu;
    $q[i] = low | ((($word(block + 16u + 4u * i) >> j) & 0x01010101u) << 4u);
  }
  $scale_and_minimum(block + 4u, j);
}
fn $sub(x: u32) -> vec2<i32> {
  return vec2<i32>($scales.x * $dots(x, 0u, 8u), $scales.y * $sum(x, 0u, 8u));
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {
  return ($half(block) * dx) * i - ($half(block + 2u) * dx) * m;
}

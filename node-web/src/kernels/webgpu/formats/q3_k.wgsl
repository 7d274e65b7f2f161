// Q3_K, 256 columns in 110 bytes: third bits at 0, pairs of bits at 32, 16 scales of six bits at 96, d f16 at 108.
const $COLS = 256u;
const $BYTES = 110u;
fn $scale(block: u32, k: u32) -> i32 {
  let low = ($byte(block + 96u + (k & 7u)) >> (4u * (k >> 3u))) & 15u;
  let high = ($byte(block + 104u + (k & 3u)) >> (2u * (k >> 2u))) & 3u;
  return i32(low | (high << 4u)) - 32;
}
fn $unpack(block: u32, j: u32) {
  $two_bits(block + 32u, j);
  for (var i = 0u; i < 8u; i++) { $q[i] |= (($word(block + 4u * i) >> j) & 0x01010101u) << 2u; }
  $scales = vec4<i32>($scale(block, 2u * j), $scale(block, 2u * j + 1u), 0, 0);
}
fn $sub(x: u32) -> vec2<i32> {
  let a = $dots(x, 0u, 4u) - 4 * $sum(x, 0u, 4u);
  let b = $dots(x, 4u, 4u) - 4 * $sum(x, 4u, 4u);
  return vec2<i32>($scales.x * a + $scales.y * b, 0);
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {
  return ($half(block + 108u) * dx) * i;
}

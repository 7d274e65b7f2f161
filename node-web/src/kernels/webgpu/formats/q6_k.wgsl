// Q6_K, 256 columns in 210 bytes: nibbles at 0, pairs of bits at 128, 16 signed scales at 192, d f16 at 208.
const $COLS = 256u;
const $BYTES = 210u;
fn $unpack(block: u32, j: u32) {
  let h = j >> 2u;   // half of the block; g: a quarter of it, 32 columns
  let g = j & 3u;
  for (var i = 0u; i < 8u; i++) {
    let low = ($word(block + 64u * h + 32u * (g & 1u) + 4u * i) >> (4u * (g >> 1u))) & 0x0f0f0f0fu;
    let high = ($word(block + 128u + 32u * h + 4u * i) >> (2u * g)) & 0x03030303u;
    $q[i] = low | (high << 4u);
  }
  $scales = vec4<i32>($signed(block + 192u + 2u * j), $signed(block + 193u + 2u * j), 0, 0);
}
fn $sub(x: u32) -> vec2<i32> {
  let a = $dots(x, 0u, 4u) - 32 * $sum(x, 0u, 4u);
  let b = $dots(x, 4u, 4u) - 32 * $sum(x, 4u, 4u);
  return vec2<i32>($scales.x * a + $scales.y * b, 0);
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {
  return ($half(block + 208u) * dx) * i;
}

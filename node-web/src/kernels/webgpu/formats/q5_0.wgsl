// Q5_0, 32 columns in 22 bytes: d f16 at 0, fifth bits at 2, nibbles at 6; weight = d * (q - 16).
const $COLS = 32u;
const $BYTES = 22u;
fn $unpack(block: u32, j: u32) {
  $nibbles(block + 6u);
  $fifth_bits($word(block + 2u));
}
fn $sub(x: u32) -> vec2<i32> {
  return vec2<i32>($dots(x, 0u, 8u) - 16 * $sum(x, 0u, 8u), 0);
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {
  return ($half(block) * dx) * i;
}

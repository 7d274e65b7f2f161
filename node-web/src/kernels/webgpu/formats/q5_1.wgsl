// Q5_1, 32 columns in 24 bytes: d, m f16 at 0, fifth bits at 4, nibbles at 8; weight = d * q + m.
const $COLS = 32u;
const $BYTES = 24u;
fn $unpack(block: u32, j: u32) {
  $nibbles(block + 8u);
  $fifth_bits($word(block + 4u));
}
fn $sub(x: u32) -> vec2<i32> {
  return vec2<i32>($dots(x, 0u, 8u), $sum(x, 0u, 8u));
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {
  return ($half(block) * dx) * i + ($half(block + 2u) * dx) * m;
}

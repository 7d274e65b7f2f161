// TQ2_0, 256 columns in 66 bytes: pairs of bits at 0, d f16 at 64; weight = d * (q - 1).
const $COLS = 256u;
const $BYTES = 66u;
fn $unpack(block: u32, j: u32) {
  $two_bits(block, j);
}
fn $sub(x: u32) -> vec2<i32> {
  return vec2<i32>($dots(x, 0u, 8u) - $sum(x, 0u, 8u), 0);
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {
  return ($half(block + 64u) * dx) * i;
}

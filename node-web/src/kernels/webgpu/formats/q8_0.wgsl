// Q8_0, 32 columns in 34 bytes: d f16 at 0, ints at 2.
const $COLS = 32u;
const $BYTES = 34u;
fn $unpack(block: u32, j: u32) {
  for (var i = 0u; i < 8u; i++) { $q[i] = $word(block + 2u + 4u * i); }
}
fn $sub(x: u32) -> vec2<i32> {
  return vec2<i32>($dots(x, 0u, 8u), 0);
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {
  return ($half(block) * dx) * i;
}

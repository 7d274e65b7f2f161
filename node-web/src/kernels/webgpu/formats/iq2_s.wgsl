// IQ2_S, 256 columns in 82 bytes: d f16 at 0, 32 points at 2, their signs at 34, their upper bits at 66, 16 scales at 74.
const $COLS = 256u;
const $BYTES = 82u;
fn $unpack(block: u32, j: u32) {
  let upper = $byte(block + 66u + j);
  for (var k = 0u; k < 4u; k++) {
    let at = IQ2_S + 2u * ($byte(block + 2u + 4u * j + k) | (((upper >> (2u * k)) & 3u) << 8u));
    let signs = $byte(block + 34u + 4u * j + k);
    $q[2u * k] = with_signs(grids[at], signs);
    $q[2u * k + 1u] = with_signs(grids[at + 1u], signs >> 4u);
  }
  $two_scales($byte(block + 74u + j));
}
fn $sub(x: u32) -> vec2<i32> {
  return $two_dots(x);
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {
  return (($half(block) * 0.125) * dx) * i;
}

// IQ2_XS, 256 columns in 74 bytes: d f16 at 0, 32 points with seven signs each at 2, 16 scales at 66.
const $COLS = 256u;
const $BYTES = 74u;
fn $unpack(block: u32, j: u32) {
  for (var k = 0u; k < 4u; k++) {
    let at_point = block + 2u + 8u * j + 2u * k;
    let code = $byte(at_point) | ($byte(at_point + 1u) << 8u);
    let at = IQ2_XS + 2u * (code & 511u);
    let signs = eight_signs(code >> 9u);
    $q[2u * k] = with_signs(grids[at], signs);
    $q[2u * k + 1u] = with_signs(grids[at + 1u], signs >> 4u);
  }
  $two_scales($byte(block + 66u + j));
}
fn $sub(x: u32) -> vec2<i32> {
  return $two_dots(x);
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {
  return (($half(block) * 0.125) * dx) * i;
}

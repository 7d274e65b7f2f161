// IQ2_XXS, 256 columns in 66 bytes: d f16 at 0; then for 32 columns four points, four times seven signs, and a scale.
const $COLS = 256u;
const $BYTES = 66u;
fn $unpack(block: u32, j: u32) {
  let points = $word(block + 2u + 8u * j);
  let rest = $word(block + 6u + 8u * j);
  for (var k = 0u; k < 4u; k++) {
    let at = IQ2_XXS + 2u * ((points >> (8u * k)) & 255u);
    let signs = eight_signs(rest >> (7u * k));
    $q[2u * k] = with_signs(grids[at], signs);
    $q[2u * k + 1u] = with_signs(grids[at + 1u], signs >> 4u);
  }
  $two_scales((rest >> 28u) * 17u);
}
fn $sub(x: u32) -> vec2<i32> {
  return $two_dots(x);
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {
  return (($half(block) * 0.125) * dx) * i;
}

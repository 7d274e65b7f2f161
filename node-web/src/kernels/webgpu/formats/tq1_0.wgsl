// TQ1_0, 256 columns in 54 bytes: five digits to base 3 in each of 48 bytes, four in each of 4; d f16 at 52.
const $COLS = 256u;
const $BYTES = 54u;
fn $digit(block: u32, column: u32) -> u32 {
  var at = column & 31u;
  var n = column >> 5u;
  if (column >= 240u) {
    at = 48u + (column & 3u);
    n = (column - 240u) >> 2u;
  } else if (column >= 160u) {
    at = 32u + (column & 15u);
    n = (column - 160u) >> 4u;
  }
  var code = $byte(block + at);
  for (var i = 0u; i < n; i++) { code *= 3u; }
  return ((code & 0xffu) * 3u) >> 8u;
}
fn $unpack(block: u32, j: u32) {
  for (var i = 0u; i < 8u; i++) {
    $q[i] = 0u;
    for (var k = 0u; k < 4u; k++) { $q[i] |= $digit(block, 32u * j + 4u * i + k) << (8u * k); }
  }
}
fn $sub(x: u32) -> vec2<i32> {
  return vec2<i32>($dots(x, 0u, 8u) - $sum(x, 0u, 8u), 0);
}
fn $term(block: u32, dx: f32, i: f32, m: f32) -> f32 {
  return ($half(block + 52u) * dx) * i;
}

// F16: two weights in a word.
fn $weight(i: u32) -> f32 {
  let both = unpack2x16float($W[i >> 1u]);
  return select(both.x, both.y, (i & 1u) == 1u);
}

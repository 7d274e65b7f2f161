// BF16: two weights in a word, each the upper half of an f32.
fn $weight(i: u32) -> f32 {
  return bitcast<f32>(($W[i >> 1u] >> (16u * (i & 1u))) << 16u);
}

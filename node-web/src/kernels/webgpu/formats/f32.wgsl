// F32: one word is one weight.
fn $weight(i: u32) -> f32 {
  return bitcast<f32>($W[i]);
}

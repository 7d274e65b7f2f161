fn products(row: u32, t: u32, picks: u32) -> vec2<f32> {
  return vec2<f32>(0.0, up_dot(row, t, picks));
}
fn hidden_of(product: f32, u: f32, weight: f32, at: u32) -> vec2<f32> {
  return vec2<f32>(activate_alone(u), product);
}

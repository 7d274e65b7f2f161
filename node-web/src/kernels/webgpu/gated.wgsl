@group(0) @binding(6) var<storage, read> gate_W: array<u32>;
@group(0) @binding(7) var<storage, read> gate_X: array<u32>;

fn gate_x_row(k: u32) -> u32 {
  return up_x_row(k);
}
fn gate_x_words() -> u32 {
  return p.gate_words;
}
fn gate_x_block() -> u32 {
  return p.gate_block;
}
fn products(row: u32, t: u32, picks: u32) -> vec2<f32> {
  let g = gate_dot(row, t, picks);
  return vec2<f32>(g, up_dot(row, t, picks));
}
// h, and 1 when g was not finite: no clamp hides it.
fn hidden_of(product: f32, u: f32, weight: f32, at: u32) -> vec2<f32> {
  let g = finished(product, weight, p.gate_scale, bias_of(at));
  return vec2<f32>(activate(g, u), select(1.0, 0.0, finite(g)));
}

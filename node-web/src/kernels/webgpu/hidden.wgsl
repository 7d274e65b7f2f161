// h = act(gate . x, up . x), one workgroup for a row and up to TILE picks; with `gated` or `ungated` before it.
@group(0) @binding(0) var<storage, read> up_W: array<u32>;
@group(0) @binding(1) var<storage, read> up_X: array<u32>;
@group(0) @binding(2) var<storage, read> picks_of: array<vec2<u32>>;   // [picks] row of X, router weight
@group(0) @binding(3) var<storage, read> biases: array<f32>;
@group(0) @binding(4) var<storage, read_write> H: array<u32>;      // [picks, all_rows] floats; BAD where not finite
@group(0) @binding(5) var<uniform> p: Params;
var<private> tile: u32;

fn bias_of(i: u32) -> f32 {
  if ((p.flags & 4u) == 0u) { return 0.0; }
  return biases[i];
}
fn up_x_row(k: u32) -> u32 {
  return picks_of[p.first_pick + tile + k].x;
}
fn up_x_words() -> u32 {
  return p.x_words;
}
fn up_x_block() -> u32 {
  return p.x_block;
}
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
  let row = group.y * p.width + group.x;
  if (row >= p.rows) { return; }
  let first = group.z * TILE;   // not `tile`: a private variable is not known to be the same for all threads
  let picks = min(TILE, p.num_picks - first);
  tile = first;
  let raw = products(row, t, picks);
  if (t < picks) {
    let pick = p.first_pick + first + t;
    let at = p.first_row + row;
    let weight = bitcast<f32>(picks_of[pick].y);
    let u = finished(raw.y, weight, p.scale, bias_of(p.bias_at + at));
    let h = hidden_of(raw.x, u, weight, at);
    H[pick * p.all_rows + at] = select(BAD, bitcast<u32>(h.x), h.y == 0.0 && finite(u) && finite(h.x));
  }
}

// CONTRACT.md, "Activation functions": its own exp, since a device's may be far off.
fn exp_parts(x: f32) -> vec2<f32> {   // q and 2^n with e^x = (q + 1) * 2^n
  let n = round(x * 1.44269502162933349609375);
  var r = x - n * 0.693359375;
  r = r - n * -0.000212194441701285541057586669921875;
  var e = 0.000198756912141107022762298583984375;
  e = e * r + 0.00139819993637502193450927734375;
  e = e * r + 0.008333452045917510986328125;
  e = e * r + 0.0416657961905002593994140625;
  e = e * r + 0.1666666567325592041015625;
  e = e * r + 0.5;
  return vec2<f32>(e * (r * r) + r, bitcast<f32>(u32(i32(n) + 127) << 23u));
}
fn gated(a: f32, z: f32) -> f32 {
  if (z < -87.0) { return 0.0; }
  let e = exp_parts(-min(z, 87.0));
  return a / (1.0 + (e.x + 1.0) * e.y);
}
fn gelu(g: f32) -> f32 {
  return gated(g, g * (1.5957691669464111328125 + 0.071354813873767852783203125 * (g * g)));
}
fn tanh_of(x: f32) -> f32 {
  let y = clamp(x, -10.0, 10.0);
  let parts = exp_parts(y + y);
  let e = parts.x * parts.y + (parts.y - 1.0);
  return e / (e + 2.0);
}
fn activate_alone(u: f32) -> f32 {
  switch (p.activation) {
    case 1u: { return gelu(u); }
    case 2u: { return max(u, 0.0); }
    case 3u: { let r = max(u, 0.0); return r * r; }
    default: { return gated(u, u); }
  }
}
fn activate(g: f32, u: f32) -> f32 {
  let cut = clamp(u, -p.limit, p.limit);
  switch (p.activation) {
    case 1u: { return gelu(g) * u; }
    case 2u: { return max(g, 0.0) * u; }
    case 3u: { let r = max(g, 0.0); return (r * r) * u; }
    case 4u: { let a = min(g, p.limit); return gated(a, p.alpha * a) * (cut + 1.0); }
    case 5u: { let a = min(g, p.limit); return gated(a, a) * cut; }
    case 6u: {
      let a = gated(p.alpha * tanh_of(g * p.inverse_alpha), g);
      if (p.limit == 0.0) { return a * u; }
      return a * (p.limit * tanh_of(u * p.inverse_limit));
    }
    default: {
      let s = gated(g, g);
      if (p.limit == 0.0) { return s * u; }
      return min(s, p.limit) * cut;
    }
  }
}

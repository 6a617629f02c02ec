// How figures are written, and what the parts are called.

export const TIERS = [
  ["gpu", "GPU"],
  ["cpu", "CPU RAM"],
  ["disk", "disk"],
  ["remote", "remote"],
];

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export function count(value) {
  return whole.format(value);
}

export function short(value) {
  for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= unit * 0.9995) {
      const scaled = value / unit;
      return (scaled < 99.95 ? tenth : whole).format(scaled) + name;
    }
  }
  return value < 9.95 && !Number.isInteger(value) ? tenth.format(value) : whole.format(value);
}

export function percent(share) {
  if (share === null || share === undefined) return "–";
  if (share > 0 && share < 0.01) return "<1%";
  // Never 100% of what is not all.
  return `${share < 1 ? Math.min(99, Math.round(share * 100)) : 100}%`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 99.5) return `${whole.format(value)} s`;
  if (value >= 9.95) return `${tenth.format(value)} s`;
  if (value >= 0.9995) return `${value.toFixed(2)} s`;
  const ms = value * 1000;
  return ms >= 9.95 || ms < 0.05 ? `${whole.format(ms)} ms` : `${tenth.format(ms)} ms`;
}

export function milliseconds(value) {
  const ms = value * 1000;
  return ms >= 10 || ms < 0.05 ? whole.format(ms) : tenth.format(ms);
}

export function sized(value) {
  for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= unit * 0.99995) return `${tenth.format(value / unit)} ${name}`;
  }
  return tenth.format(value);
}

export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString("en-GB");
}

export function lasting(unixSeconds, now) {
  const s = Math.max(0, Math.round(now - unixSeconds));
  const [d, h, m] = [Math.floor(s / 86400), Math.floor(s / 3600) % 24, Math.floor(s / 60) % 60];
  if (d) return `${d} d ${h} h`;
  if (h) return `${h} h ${m} min`;
  return m ? `${m} min` : `${s} s`;
}

export function plural(value, name) {
  return `${count(value)} ${name}${value === 1 ? "" : "s"}`;
}

// The parts of a prompt: tokens matched in each tier, and the rest, which is computed.
export function promptParts(matched, all) {
  const found = TIERS.map(([tier, name]) => [tier, name, matched[tier] ?? 0]);
  const sum = found.reduce((total, [, , tokens]) => total + tokens, 0);
  return [...found, ["computed", "computed", Math.max(0, all - sum)]].filter(([, , n]) => n > 0);
}

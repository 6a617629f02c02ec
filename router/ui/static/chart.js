// Time to first token, cold against warm, over the window. The axis is logarithmic: warm answers
// may come a hundred times sooner.

import { byId, setAttribute, setText, shape } from "./elements.js";
import { clock, seconds } from "./words.js";

const KINDS = ["cold", "warm"];
const TICKS_S = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300];
const [LEFT, RIGHT, TOP, BOTTOM] = [52, 14, 10, 26];
const MOST_GAP = 3;
const LEAST_SPAN_S = 120;
const STEPS_S = [15, 30, 60, 120, 180, 300];

const chart = { state: null, chosen: null, resting: null };

export function begin() {
  const svg = byId("chart");
  chart.resting = byId("readout").textContent.replace(/\s+/g, " ").trim();
  svg.addEventListener("pointermove", (event) => {
    const { left, width } = svg.getBoundingClientRect();
    choose(nearest((event.clientX - left - LEFT) / (width - LEFT - RIGHT)));
  });
  svg.addEventListener("pointerleave", () => choose(null));
  svg.addEventListener("blur", () => choose(null));
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step !== undefined && chart.state !== null) {
      event.preventDefault();
      move(step);
    }
  });
  new ResizeObserver(() => chart.state && draw()).observe(svg);
}

export function show(state) {
  chart.state = state;
  draw();
}

function slices() {
  return chart.state.ttft.slices;
}

function move(step) {
  const known = slices();
  if (!known.length) return;
  const at = known.findIndex((each) => each.began === chart.chosen);
  const next = at < 0 ? known.length - 1 : Math.min(known.length - 1, Math.max(0, at + step));
  choose(known[next].began);
}

function nearest(share) {
  if (chart.state === null || !slices().length) return null;
  const at = chart.state.now - span() * (1 - share);
  const far = (each) => Math.abs(middle(each) - at);
  return slices().reduce((best, each) => (far(each) < far(best) ? each : best)).began;
}

function choose(began) {
  chart.chosen = began;
  if (chart.state !== null) draw();
}

// The time of the middle of a slice; of the current one, that of what there is of it.
function middle({ began }) {
  return (began + Math.min(began + chart.state.ttft.slice_s, chart.state.now)) / 2;
}

// As long as the router has run, so that a short time fills the chart too.
function span() {
  const { now, started, window_s } = chart.state;
  return Math.min(window_s, Math.max(LEAST_SPAN_S, now - started));
}

function draw() {
  const svg = byId("chart");
  const [width, height] = [svg.clientWidth, svg.clientHeight];
  if (!width || !height) return;
  setAttribute(svg, "viewBox", `0 0 ${width} ${height}`);
  setAttribute(svg, "aria-label", summary());
  const scale = scales(width, height);
  svg.replaceChildren(
    ...grid(scale, width, height),
    ...KINDS.flatMap((kind) => [band(kind, scale)]),
    ...KINDS.flatMap((kind) => line(kind, scale)),
    ...pointer(scale, height),
    ...(slices().length ? [] : [empty(width, height)]),
  );
  const chosen = slices().find((each) => each.began === chart.chosen);
  setText(byId("readout"), chosen ? reading(chosen) : chart.resting);
}

function summary() {
  const { totals } = chart.state;
  const told = (kind) => `${kind} ${totals[kind] ? seconds(totals[kind].p50_s) : "none"}`;
  return `Median time to first token of the last 15 minutes: ${KINDS.map(told).join(", ")}. ` +
    "Arrow keys read out single points.";
}

function reading(slice) {
  const told = KINDS.filter((kind) => slice[kind] !== null).map((kind) => {
    const { count, p50_s, p90_s } = slice[kind];
    return `${kind}: median ${seconds(p50_s)}, p90 ${seconds(p90_s)} of ${count}`;
  });
  return `${clock(slice.began)}  ${told.join("; ")}`;
}

function scales(width, height) {
  const { now } = chart.state;
  const times = slices().flatMap((each) =>
    KINDS.flatMap((kind) => (each[kind] ? [each[kind].p50_s, each[kind].p90_s] : [])));
  const [least, most] = times.length ? [Math.min(...times), Math.max(...times)] : [0.03, 1];
  const below = TICKS_S.filter((each) => each <= least).at(-1) ?? TICKS_S[0];
  const above = TICKS_S.find((each) => each >= most && each > below) ?? TICKS_S.at(-1);
  const [low, high] = [Math.log(below), Math.log(above)];
  const plot = height - TOP - BOTTOM;
  return {
    ticks: TICKS_S.filter((each) => each >= below && each <= above),
    x: (at) => LEFT + (1 - (now - at) / span()) * (width - LEFT - RIGHT),
    y: (s) => TOP + (1 - (Math.log(Math.max(s, below)) - low) / (high - low)) * plot,
  };
}

function grid({ ticks, x, y }, width, height) {
  const made = ticks.flatMap((tick) => [
    shape("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }),
    shape("text", { class: "axis end", x: LEFT - 8, y: y(tick) + 4 }, tickText(tick)),
  ]);
  const most = Math.max(2, Math.floor(width / 110));
  const step = STEPS_S.find((each) => span() / each <= most) ?? STEPS_S.at(-1);
  for (let ago = 0; ago <= span(); ago += step) {
    const at = x(chart.state.now - ago);
    // The leftmost one would run out of the chart.
    const place = ago === 0 ? "end" : at - LEFT < 24 ? "start" : "middle";
    made.push(shape("text", { class: `axis ${place}`, x: at, y: height - 8 }, agoText(ago, step)));
  }
  return made;
}

function agoText(ago, step) {
  if (ago === 0) return "now";
  const [whole, rest] = [Math.floor(ago / 60), String(ago % 60).padStart(2, "0")];
  return step % 60 ? `−${whole}:${rest}` : `−${whole} min`;
}

function tickText(tick) {
  return tick < 1 ? `${Math.round(tick * 1000)} ms` : `${tick} s`;
}

// Points that stand close enough together to be joined.
function runs(kind) {
  const found = [];
  let last = -Infinity;
  for (const slice of slices()) {
    if (slice[kind] === null) continue;
    if (slice.began - last > MOST_GAP * chart.state.ttft.slice_s) found.push([]);
    found.at(-1).push(slice);
    last = slice.began;
  }
  return found;
}

function band(kind, { x, y }) {
  const outline = runs(kind).map((run) => {
    const upper = run.map((each) => `${x(middle(each))},${y(each[kind].p90_s)}`);
    const lower = run.map((each) => `${x(middle(each))},${y(each[kind].p50_s)}`).reverse();
    return `M${[...upper, ...lower].join("L")}Z`;
  });
  return shape("path", { class: `band ${kind}`, d: outline.join("") });
}

function line(kind, { x, y }) {
  const all = runs(kind);
  const path = all.map((run) =>
    `M${run.map((each) => `${x(middle(each))},${y(each[kind].p50_s)}`).join("L")}`);
  const dots = all.flat().map((each) =>
    shape("circle", { class: `dot ${kind}`, r: 1.8, cx: x(middle(each)), cy: y(each[kind].p50_s) }));
  return [shape("path", { class: `curve ${kind}`, d: path.join("") }), ...dots];
}

function pointer({ x, y }, height) {
  const slice = slices().find((each) => each.began === chart.chosen);
  if (slice === undefined) return [];
  const at = x(middle(slice));
  const marks = KINDS.filter((kind) => slice[kind] !== null).map((kind) =>
    shape("circle", { class: `mark ${kind}`, r: 4.5, cx: at, cy: y(slice[kind].p50_s) }));
  return [shape("line", { class: "pointer", x1: at, x2: at, y1: TOP, y2: height - BOTTOM }), ...marks];
}

function empty(width, height) {
  return shape("text", { class: "axis middle", x: (LEFT + width - RIGHT) / 2, y: height / 2 },
    "No streamed answer in the last 15 minutes");
}

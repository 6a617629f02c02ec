// The fleet: one row for each replica, and the totals above.

import { bar, byId, cell, element, headings, reconcile, setAttribute, setText } from "./elements.js";
import { TIERS, count, percent, plural, promptParts, seconds, short } from "./words.js";

const PHASES = [
  ["queued", "Sent; waits behind another prefill, according to the router's schedule"],
  ["fetching", "Held back while KV is copied from disk, remote store or a peer to CPU RAM"],
  ["prefilling", "Its prompt is being computed"],
  ["decoding", "Its first token has arrived"],
];

export function begin() {
  const legend = [...TIERS, ["computed", "computed"]];
  byId("legend").append(
    ...legend.map(([tier, name]) =>
      element("li", {}, element("span", { class: `swatch ${tier}`, "aria-hidden": "true" }), name),
    ),
  );
  headings(byId("fleet-head"), [
    ["Replica", "", "State, and the sources of what the router knows about its KV"],
    ...PHASES.map(([name, title]) => [name, "number", title]),
    ...TIERS.map(([, name]) => [name, "tier", "How full the tier is, and how many blocks or chunks are known"]),
    ["warm", "warmth", "Share of prompt tokens that were matched, last 15 minutes"],
    ["sessions", "number", "Sessions whose home it is"],
  ]);
}

export function show(state) {
  reconcile(byId("fleet"), state.replicas, (each) => each.id, makeRow, updateRow);
  reconcile(byId("totals"), totals(state), (each) => each.name, makeTotal, updateTotal);
}

function totals({ totals: all, sessions, window_s }) {
  const minutes = Math.round(window_s / 60);
  const spilled = sessions.turns ? `${percent(sessions.spills / sessions.turns)} spilled` : "";
  const held = all.waiting ? `, ${plural(all.waiting, "waiting request")} in the router` : "";
  return [
    { name: "Requests", value: short(all.requests_per_s), unit: "/s",
      more: `${all.requests < 1e6 ? count(all.requests) : short(all.requests)} since start` },
    { name: "Prompt tokens matched", value: percent(all.warmth), unit: "",
      more: all.prompt_tokens ? `of ${short(all.prompt_tokens)} in ${minutes} min` : "none yet" },
    { name: "First token, warm", value: seconds(all.warm?.p50_s), unit: "", tone: "warm",
      more: all.warm ? `median; p90 ${seconds(all.warm.p90_s)}` : "no warm answer yet" },
    { name: "First token, cold", value: seconds(all.cold?.p50_s), unit: "", tone: "cold",
      more: all.cold ? `median; p90 ${seconds(all.cold.p90_s)}` : "no cold answer yet" },
    { name: "Per output token", value: seconds(all.tpot?.p50_s), unit: "",
      more: all.tpot ? `median; p90 ${seconds(all.tpot.p90_s)}` : "no streamed answer yet" },
    { name: "In flight", value: count(all.in_flight), unit: "", more: `at replicas${held}` },
    { name: "Sessions", value: short(sessions.count), unit: "", more: spilled || "no turns yet" },
  ];
}

function makeTotal({ name, tone }) {
  const value = element("dd", { class: "value" });
  return element("div", { "data-tone": tone }, element("dt", {}, name), value,
    element("dd", { class: "more" }));
}

function updateTotal(row, { value, unit, more }) {
  setText(row.children[1], value + unit);
  setText(row.children[2], more);
}

function makeRow({ id, url }) {
  const name = element("th", { role: "rowheader", scope: "row", class: "replica" },
    element("span", { class: "name", title: url }, id),
    element("span", { class: "state" }),
    element("span", { class: "note" }));
  const cells = [
    ...PHASES.map(([phase]) => cell(phase, "number phase")),
    ...TIERS.map(([tier, label]) => cell(label, `tier ${tier}`, gauge())),
    cell("warm", "warmth", element("div", { class: "meter" }, element("span", { class: "figure" }),
      element("div", { class: "holder" }))),
    cell("sessions", "number"),
  ];
  return element("tr", { role: "row" }, name, ...cells);
}

function gauge() {
  const track = element("div", { class: "track", "aria-hidden": "true" }, element("span"));
  return element("div", { class: "meter" }, element("span", { class: "figure" }),
    element("span", { class: "known" }), track);
}

function updateRow(row, replica) {
  setAttribute(row, "data-state", replica.state);
  const [, state, note] = row.children[0].children;
  setText(state, replica.state);
  setText(note, noteOf(replica));
  setAttribute(note, "title", replica.note);
  setAttribute(note, "data-kind", replica.note === null ? "told" : "problem");
  PHASES.forEach(([phase], at) => {
    const [value, its] = [replica[phase], row.children[1 + at]];
    setText(its, count(value));
    setAttribute(its, "data-none", value ? null : "");
  });
  TIERS.forEach(([tier], at) => updateGauge(row.children[5 + at], tier, replica));
  updateWarmth(row.children[9], replica);
  setText(row.children[10], count(replica.homes));
  setAttribute(row.children[10], "data-none", replica.homes ? null : "");
}

function noteOf({ note, told_by, others }) {
  if (note !== null) return note;
  const told = told_by.length ? told_by.join(", ") : "does not report its KV";
  return others ? `${told}; ${plural(others, "request")} of other routers` : told;
}

function updateGauge(its, tier, replica) {
  const { keys, full, tokens, capacity_tokens } = replica.tiers[tier];
  const [figure, known, track] = its.firstElementChild.children;
  const believed = tier === "gpu" && !keys && replica.believed_keys;
  const shown = believed ? replica.believed_keys : keys;
  const name = tier === "gpu" ? "block" : "chunk";
  setText(figure, full === null ? (shown ? "" : "–") : percent(full));
  setText(known, shown ? `${believed ? "~" : ""}${short(shown)} ${name}${shown === 1 ? "" : "s"}` : "");
  setAttribute(its, "title", gaugeTitle(tokens, capacity_tokens, believed));
  track.firstElementChild.style.width = `${(full ?? 0) * 100}%`;
  setAttribute(track, "hidden", full === null ? "" : null);
}

function gaugeTitle(tokens, capacity, believed) {
  if (believed) return "Not reported by the replica: blocks that the router has sent there";
  if (tokens === null) return null;
  const of = capacity === null ? "" : ` of ${count(capacity)}`;
  return `KV of ${count(tokens)}${of} tokens is known to be in this tier`;
}

function updateWarmth(its, replica) {
  const [figure, holder] = its.firstElementChild.children;
  setText(figure, percent(replica.warmth));
  const parts = promptParts(replica.matched_tokens, replica.prompt_tokens);
  const all = replica.prompt_tokens;
  const title = parts.map(([, name, tokens]) => `${name} ${count(tokens)}`).join(", ");
  setAttribute(its, "title", all ? `Of ${count(all)} prompt tokens: ${title}` : null);
  if (holder.dataset.shown !== title) {
    holder.dataset.shown = title;
    holder.replaceChildren(...(all ? [bar(parts.map(([tier, , n]) => [tier, n / all]))] : []));
  }
}

// The requests that have ended last. A row opens what `warmroute why` prints.

import { bar, byId, cell, element, headings, reconcile, setText } from "./elements.js";
import { clock, count, promptParts, seconds } from "./words.js";

export function begin(ask) {
  byId("requests").addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    // Not while text of the row is being selected.
    if (row !== null && getSelection().isCollapsed) open(ask, row.dataset.id);
  });
  byId("why-close").addEventListener("click", () => byId("why").close());
  headings(byId("requests-head"), [
    ["Ended", "time", null],
    ["Replica", "", null],
    ["Why", "why", "Why that replica was picked"],
    ["Prompt tokens", "prompt", "By the tier in which they were found; the rest was computed"],
    ["Predicted", "number predicted", "Predicted time to first token, including the time held in the router"],
    ["TTFT", "number", "Time to first token; if the answer was not streamed, time to its end"],
    ["TPOT", "number", "Time per output token after the first one, of streamed answers"],
    ["Status", "number", null],
  ]);
}

export function show({ requests }) {
  reconcile(byId("requests"), requests, (each) => each.number, makeRow);
  byId("no-requests").hidden = requests.length > 0;
}

async function open(ask, id) {
  const { answer, problem } = await ask(`requests/${encodeURIComponent(id)}`);
  const sections = Object.entries(answer?.why ?? { "": [problem] });
  byId("why-told").replaceChildren(...sections.flatMap(([heading, lines]) =>
    [element("h3", {}, heading), element("pre", {}, lines.join("\n"))]));
  setText(byId("why-id"), id);
  if (!byId("why").open) byId("why").showModal();
}

function makeRow(request) {
  const { replica, reason, home, status, outcome, tries } = request;
  const spilled = reason === "session-spill" && home;
  const why = [reason ?? "–", spilled ? ` from ${home}` : "", tries > 1 ? `, try ${tries}` : ""];
  const ok = outcome === "ok" && status !== null && status < 400;
  return element(
    "tr", { role: "row", class: ok ? null : "troubled", title: `${request.endpoint} ${request.id}`,
      "data-id": request.id },
    cell("ended", "time", element("button", { type: "button", title: "Where its time went" },
      clock(request.ended))),
    cell("replica", "replica", replica ?? "none"),
    cell("why", "why", why.join("")),
    cell("prompt tokens", "prompt", prompt(request)),
    cell("predicted", "number predicted", seconds(request.predicted_s)),
    cell("TTFT", "number", time(request)),
    cell("TPOT", "number", seconds(request.tpot_s)),
    cell("status", "number outcome", outcome === "ok" ? String(status) : said(status, outcome)),
  );
}

function said(status, outcome) {
  return status === null ? outcome : `${status} ${outcome}`;
}

function time({ streamed, ttft_s }) {
  if (streamed || ttft_s === null) return seconds(ttft_s);
  return element("span", { class: "whole", title: "Not streamed: time to the end of the answer" },
    seconds(ttft_s));
}

function prompt({ prompt_tokens: all, matched_tokens: matched }) {
  if (!all) return "–";
  const parts = promptParts(matched, all);
  const told = parts.map(([tier, name, tokens]) =>
    element("span", {}, element("span", { class: `swatch ${tier}`, "aria-hidden": "true" }),
      `${name} ${count(tokens)}`));
  return element("div", { class: "split" },
    element("span", { class: "all" }, count(all)),
    bar(parts.map(([tier, , tokens]) => [tier, tokens / all])),
    element("span", { class: "parts" }, ...told));
}

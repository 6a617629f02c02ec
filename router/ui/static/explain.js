// The explain box: the same as `warmroute explain` prints.

import { bar, byId, element, setText } from "./elements.js";
import { TIERS, count, milliseconds, percent, plural, promptParts, seconds, sized } from "./words.js";

const COSTS = ["base", "queue", "fetch", "load", "prefill"];
const RATES = [
  ["prefill tokens/s", "prefill", "prefill_tokens_per_s", (value) => count(value)],
  ["decode", "decode", "decode_slowdown", (value) => `+${(value * 100).toFixed(1)}%`],
  ["load B/s", "load", "cpu_load_bytes_per_s", sized],
  ["disk B/s", "disk", "disk_bytes_per_s", sized],
  ["remote B/s", "remote", "remote_bytes_per_s", sized],
  ["copy B/s", "peer", "peer_bytes_per_s", sized],
];

export function begin(ask) {
  byId("explain").addEventListener("submit", (event) => {
    event.preventDefault();
    explain(ask);
  });
  byId("explain-prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) explain(ask);
  });
}

export function show({ models }) {
  const select = byId("explain-model");
  // Last: without a model its tokenizer is not known, and tokens are estimated.
  const names = [...models, ""];
  if (JSON.stringify(names) === select.dataset.names) return;
  const chosen = select.dataset.names === undefined ? names[0] : select.value;
  select.dataset.names = JSON.stringify(names);
  select.replaceChildren(...names.map((name) =>
    element("option", { value: name, selected: name === chosen }, name || "any")));
}

async function explain(ask) {
  const result = byId("explained");
  const body = bodyOf(byId("explain-prompt").value);
  if (typeof body === "string") return fail(result, body);
  const model = byId("explain-model").value;
  if (model && body.model === undefined) body.model = model;
  const session = byId("explain-session").value.trim();
  // The first that is looked for in a body.
  if (session) body.prompt_cache_key = session;
  const { answer, problem } = await ask("explain", body);
  if (problem) return fail(result, problem);
  result.replaceChildren(...explained(answer));
}

function fail(result, text) {
  result.replaceChildren(element("p", { class: "problem", role: "alert" }, text));
}

// Returns the request's body, or what is wrong with it.
function bodyOf(text) {
  if (!text.trim()) return "Type a prompt first.";
  if (!text.trimStart().startsWith("{")) return { messages: [{ role: "user", content: text }] };
  try {
    return JSON.parse(text);
  } catch (error) {
    return `This begins with { but is not JSON: ${error.message}`;
  }
}

function explained(answer) {
  const rest = answer.left_out ? [hint(`and ${count(answer.left_out)} more, not shown`)] : [];
  return [
    verdict(answer),
    facts(answer),
    element("h3", {}, "Predicted times"),
    hint("In milliseconds: ttft = base + the longer of queue and fetch + load + prefill. Then the " +
      "prompt's tokens by tier, tokens copied from a peer, and requests in flight (busy)."),
    table(costColumns(answer), answer),
    ...rest,
    element("h3", {}, "Measured rates"),
    hint("What each replica measured: rates, how much one running decode slows a prefill, " +
      "and the error of predictions. In brackets: start values."),
    table(rateColumns(answer.candidates), answer),
  ];
}

function hint(text) {
  return element("p", { class: "hint" }, text);
}

function verdict(answer) {
  return element("p", { class: "verdict" }, element("strong", {}, answer.replica),
    element("span", { class: "reason" }, answer.reason), element("span", { class: "sentence" }, answer.why));
}

function facts(answer) {
  const { prompt_tokens: all, matched_tokens: matched, copy } = answer;
  const parts = promptParts(matched, all);
  const told = parts.map(([, name, tokens]) => `${name} ${count(tokens)}`).join(", ");
  const rows = [
    ["prompt", `${count(all)} tokens${answer.exact_tokens ? "" : " (estimated)"}: ${told}`],
    ["predicted", `${seconds(answer.predicted_ttft_s)} to the first token`],
    ["accuracy", trust(answer)],
  ];
  if (answer.prefetch_chunks) {
    const gain = seconds(answer.expected_gain_s);
    rows.push(["prefetch", `${plural(answer.prefetch_chunks, "chunk")}, gains ${gain}`]);
  }
  if (copy) {
    rows.push(["copy", `${plural(copy.chunks, "chunk")} (${sized(copy.bytes)}B) from ` +
      `${copy.source}, gains ${seconds(copy.expected_gain_s)}`]);
  }
  const list = element("dl", { class: "facts" }, ...rows.map(([name, text]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, text))));
  list.children[0].children[1].append(bar(parts.map(([tier, , n]) => [tier, all ? n / all : 0])));
  return list;
}

function trust({ replica, candidates }) {
  const { predictions } = candidates.find((each) => each.replica_id === replica);
  if (predictions === null) return `${replica} has not streamed an answer yet`;
  const { ratio, answers } = predictions;
  return `error of the predictions for ${replica}: median ${percent(ratio.p50)}, ` +
    `p90 ${percent(ratio.p90)} (${plural(answers, "answer")})`;
}

function costColumns({ candidates }) {
  const columns = [
    ["replica", (each) => each.replica_id],
    ["ttft", (each) => milliseconds(each.ttft_s)],
    ...COSTS.map((part) => [part, (each) => milliseconds(each[`${part}_s`])]),
    ...TIERS.map(([tier, name]) => [name, (each) => count(each.matched_tokens[tier] ?? 0)]),
    ["copied", (each) => count(each.copied_tokens)],
    ["busy", (each) => count(each.in_flight)],
  ];
  // What is nothing everywhere is left out.
  return columns.filter(([, text]) => candidates.some((each) => text(each) !== "0"));
}

function rateColumns() {
  const off = (quantile) => ({ predictions }) =>
    (predictions === null ? "–" : percent(predictions.ratio[quantile]));
  return [
    ["replica", (each) => each.replica_id],
    ...RATES.map(([name, part, key, text]) => [name, ({ rates }) =>
      (part in rates.measured ? text(rates[key]) : `(${text(rates[key])})`)]),
    ["p50 off", off("p50")],
    ["p90 off", off("p90")],
  ];
}

function table(columns, { candidates, replica }) {
  const head = columns.map(([name], at) =>
    element("th", { scope: "col", class: at ? "number" : null }, name));
  const rows = candidates.map((each) => {
    const isPicked = each.replica_id === replica;
    const name = element("th", { scope: "row" });
    setText(name, columns[0][1](each));
    if (isPicked) name.append(element("span", { class: "picked" }, "picked"));
    const cells = columns.slice(1).map(([, text]) => element("td", { class: "number" }, text(each)));
    return element("tr", { class: isPicked ? "pick" : null }, name, ...cells);
  });
  return element("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Candidates" },
    element("table", { class: "candidates" },
      element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)));
}

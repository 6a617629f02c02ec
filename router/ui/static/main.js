// Asks the router for its state once a second while the page is seen, and shows it.

import * as chart from "./chart.js";
import { byId, setText } from "./elements.js";
import * as explain from "./explain.js";
import * as fleet from "./fleet.js";
import * as requests from "./requests.js";
import * as sessions from "./sessions.js";
import { clock, lasting, plural } from "./words.js";

const EVERY_MS = 1000;
const WITHIN_MS = 5000;
const KEY = "warmroute-admin-key";

const poll = { timer: null, asking: false, lostAt: null };

async function refresh() {
  clearTimeout(poll.timer);
  if (document.hidden) return status("paused", "paused");
  if (poll.asking) return;
  poll.asking = true;
  try {
    const response = await fetch("ui/state", { ...options(), signal: AbortSignal.timeout(WITHIN_MS) });
    await take(response);
  } catch (error) {
    lost(error);
  } finally {
    poll.asking = false;
  }
}

function options() {
  const key = sessionStorage.getItem(KEY);
  return { cache: "no-store", headers: key === null ? {} : { Authorization: `Bearer ${key}` } };
}

async function take(response) {
  if (response.status === 401) return askForKey();
  if (response.ok) {
    const state = await response.json();
    poll.lostAt = null;
    byId("key").hidden = true;
    show(state);
    status("live", "live");
    notice(null);
  } else {
    status("refused", "refused");
    stale(true);
    notice(await problemOf(response));
  }
  later();
}

function show(state) {
  byId("main").hidden = false;
  stale(false);
  const up = state.replicas.filter((each) => each.state === "up").length;
  setText(byId("about"), `${up} of ${plural(state.replicas.length, "replica")} up, policy ` +
    `${state.policy}, running for ${lasting(state.started, state.now)}`);
  for (const part of [fleet, chart, sessions, requests, explain]) part.show(state);
}

function lost(error) {
  poll.lostAt ??= Date.now() / 1000;
  status("unreachable", "unreachable");
  stale(true);
  const why = error.name === "TimeoutError" ? "does not answer" : "cannot be reached";
  const old = byId("main").hidden ? "" : " The page shows the state of that time.";
  notice(`The router ${why} since ${clock(poll.lostAt)}.${old} Trying again every second.`);
  later();
}

function later() {
  clearTimeout(poll.timer);
  poll.timer = setTimeout(refresh, EVERY_MS);
}

function askForKey() {
  const refused = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  status("refused", refused ? "key refused" : "key needed");
  stale(true);
  notice(null);
  setText(byId("key-label"), refused
    ? "The router refused this key. Enter its admin key."
    : "This router asks for an admin key.");
  byId("key").hidden = false;
  byId("key-input").focus();
}

async function problemOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The router answered ${response.status} ${response.statusText}.`;
  }
}

// Without a body it is a GET.
async function ask(path, body) {
  const sent = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  try {
    const response = await fetch(path, {
      ...options(), ...sent, signal: AbortSignal.timeout(30000),
    });
    if (response.ok) return { answer: await response.json() };
    return { problem: await problemOf(response) };
  } catch {
    return { problem: "The router cannot be reached." };
  }
}

function status(state, text) {
  byId("status").dataset.state = state;
  setText(byId("status"), text);
}

function notice(text) {
  byId("notice").hidden = text === null;
  setText(byId("notice"), text ?? "");
}

function stale(isStale) {
  byId("main").classList.toggle("stale", isStale);
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key-input").value.trim());
  byId("key-input").value = "";
  refresh();
});
document.addEventListener("visibilitychange", refresh);
fleet.begin();
requests.begin(ask);
chart.begin();
explain.begin(ask);
refresh();

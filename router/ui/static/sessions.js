// Sessions: how many, where they are at home, and which have left a busy home of late.

import { bar, byId, element, reconcile, setText } from "./elements.js";
import { clock, count, percent, short } from "./words.js";

export function show({ sessions, replicas }) {
  const { turns, spills } = sessions;
  const facts = [
    ["known", `${short(sessions.count)} of at most ${short(sessions.max)}`],
    ["turns", `${count(turns)} in 15 minutes`],
    ["spilled", turns ? `${count(spills)}, ${percent(spills / turns)} of them` : "–"],
  ];
  reconcile(byId("sessions"), facts, ([name]) => name, makeFact, updateFact);
  showHomes(replicas);
  reconcile(byId("spills"), sessions.last_spills, keyOf, makeSpill);
  byId("no-spills").hidden = sessions.last_spills.length > 0;
}

function keyOf({ ended, home, replica }) {
  return `${ended.toFixed(2)} ${home} ${replica}`;
}

function makeFact([name]) {
  return element("div", {}, element("dt", {}, name), element("dd"));
}

function updateFact(row, [, value]) {
  setText(row.children[1], value);
}

function showHomes(replicas) {
  const most = Math.max(1, ...replicas.map((each) => each.homes));
  reconcile(byId("homes"), replicas, (each) => each.id, makeHome, (row, replica) => {
    setText(row.children[1], count(replica.homes));
    row.children[2].replaceChildren(bar([["home", replica.homes / most]]));
  });
}

function makeHome({ id }) {
  return element("li", {}, element("span", { class: "name" }, id),
    element("span", { class: "number" }), element("span"));
}

function makeSpill({ ended, home, replica }) {
  return element("li", {}, element("span", { class: "time" }, clock(ended)),
    `${home} → ${replica}`);
}

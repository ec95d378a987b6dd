// Explains keys, or those of a prompt: where they are, or why not.

import { ask } from "./ask.js";
import { byId, cells, keyed, make, setText } from "./dom.js";
import { count, duration } from "./units.js";
import { helpFor } from "./views.js";

const DIGITS_SHOWN = 16;
const list = (text) => text.split(/[\s,[\]]+/).filter(Boolean);

export function startExplaining() {
  const form = byId("explain");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    explain(Object.fromEntries(new FormData(form)));
  });
  form.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.target.tagName !== "TEXTAREA") return;
    event.preventDefault();
    form.requestSubmit();
  });
}

// The namespaces to choose from: by their label, or by id where a label is not one namespace's.
export function knowNamespaces(namespaces) {
  const rows = Object.entries(namespaces);
  const named = ({ label }) => label && rows.filter(([, other]) => other.label === label).length === 1;
  keyed(byId("known-namespaces"), rows, ([id]) => id, () => make("option"), (option, [id, row]) => {
    option.value = named(row) ? row.label : id;
    option.label = named(row) ? row.layout : `${row.label} ${row.layout}`;
  });
}

async function explain({ keys, tokens, chunk_tokens, ...named }) {
  show("asking the pool and every tier …", []);
  try {
    const body = { ...named, keys: list(keys), tokens: list(tokens).map(tokenOf), chunk_tokens: chunk_tokens ? Number(chunk_tokens) : null };
    const told = await ask("explain", { method: "POST", body });
    const [hits, first] = [told.filter((each) => each.hit).length, told.findIndex((each) => !each.hit)];
    const prefix = body.tokens.length && first > 0 ? `; an engine gets the first ${count(first)}` : "";
    show(`${count(hits)} of ${count(told.length)} ${told.length === 1 ? "key" : "keys"} found${prefix}`, told);
  } catch (error) {
    show(error instanceof TypeError ? "no answer: try again" : error.message, []);
  }
}

function tokenOf(text) {
  if (!/^[0-9]+$/.test(text)) throw new Error(`${text.slice(0, 80)} is not a token id: give whole numbers, separated by commas or spaces`);
  return Number(text);
}

function show(said, told) {
  setText(byId("explained"), said);
  byId("explanations").hidden = told.length === 0;
  keyed(byId("explanations").tBodies[0], told.map((each, at) => ({ ...each, at })), ({ at }) => String(at), () => make("tr"), (row, each) => {
    const { at_unix_s, age_s } = each;
    const since = at_unix_s === null ? "" : `${new Date(1e3 * at_unix_s).toLocaleString()}, ${duration(age_s)} ago`;
    const tiers = each.tiers.map((tier) => `tier ${tier.tier}: ${tier.why}`).join("; ");
    const helps = each.hit ? "" : helpFor(each.reason);
    cells(row, [
      `${each.key.slice(0, DIGITS_SHOWN)}…`, each.hit ? "found" : each.reason, each.where.join(", ") || "nowhere", since,
      (each.hit ? tiers : each.why) + (helps && `. What helps: ${helps}`),
    ]);
    row.cells[0].className = "named";
  });
}

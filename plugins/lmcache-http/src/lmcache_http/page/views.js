// Shows an answer of /status in the tables and tiles of the page.

import { byId, cells, headed, keyed, make, prose, setBar, setText } from "./dom.js";
import { tiersOf } from "./history.js";
import { count, duration, percent, size } from "./units.js";

export const EVENTS_SHOWN = 50;
const KEYS_SHOWN = 2;

export function showStatus(status, history, actions) {
  showServer(status);
  showTroubles(status);
  showTiles(status, history);
  showWhatIf(status.l1);
  showMisses(status);
  showStores(status, actions);
  showNamespaces(status);
  showTenants(status, actions);
  showHolders(status);
}

function showServer(status) {
  const { name, version, uptime_s, draining, pid } = status.server;
  setText(byId("server-name"), name);
  document.title = `${name} · lmcache-core`;
  setText(byId("server-line"), `${draining ? "draining" : "serving"} for ${duration(uptime_s)}, pid ${pid}, version ${version}`);
}

function showTroubles(status) {
  const said = status.troubles.length ? status.troubles : ["none"];
  byId("troubles").classList.toggle("well", status.troubles.length === 0);
  keyed(byId("trouble-list"), said, (each) => each, () => make("li"), (item, each) => setText(item, each));
}

function showTiles(status, history) {
  const { l1, traffic } = status;
  const now = (figure, write) => {
    const rate = history.rate(figure);
    return rate === null ? "–" : write(rate);
  };
  const tiles = [
    ["pool", "Pool", percent(l1.used_bytes / l1.pool_bytes), `${size(l1.used_bytes)} of ${size(l1.pool_bytes)}`],
    ["hit-rate", "Hit rate", percent(traffic.lookups.hit_rate), `${count(traffic.lookups.hits)} of ${count(traffic.lookups.keys)} keys`, traffic.lookups.hit_rate],
    ["hit-rate-now", "Hit rate, last minute", history.hitRate() === null ? "–" : percent(history.hitRate()), ""],
    ["lookups", "Lookups a second", now((each) => each.traffic.lookups.calls, count), `${count(traffic.lookups.calls)} in all`],
    ["read", "Read a second", now((each) => each.traffic.retrieves.bytes, size), `${size(traffic.retrieves.bytes)} in all`],
    ["stored", "Stored a second", now((each) => each.counters.stored_bytes ?? 0, size), `${size(status.counters.stored_bytes ?? 0)} in all`],
    ["evictions", "Evictions a second", now((each) => each.l1.counters.evictions, count), `${count(l1.counters.evictions)} in all, ${l1.eviction_policy}`],
    ["clients", "Clients", count(status.sessions_connected), `${count(status.deaths)} died`],
  ];
  keyed(byId("tiles"), tiles, ([id]) => id,
    ([id, name]) => make("div", { id: `tile-${id}` }, make("dt", { textContent: name }), make("dd"), make("dd")),
    (tile, [, , value, more, exact]) => {
      if (exact !== undefined) tile.children[1].dataset.exact = exact;
      setText(tile.children[1], value);
      setText(tile.children[2], more);
    });
}

// --- shadow caches ---------------------------------------------------------------------------------------------

// As `lmcache-core size --from-live` has it: shares of the uses of sampled keys.
function showWhatIf({ policy, pool_bytes, eviction_policy }) {
  const there = policy?.lru_hit_share_by_size !== undefined;
  const seen = there && policy.sampled_uses > 0;
  byId("what-if").hidden = !seen;
  setText(byId("what-if-line"), seen
    ? `Of ${count(policy.sampled_uses)} uses of one key in ${count(policy.sampled_one_in)}. Now: ${policy.order}.`
    : there ? "No use of a sampled key has been seen yet."
      : `The policy ${eviction_policy} has no shadow caches. With l1.eviction.type = "adaptive" they show here what would have hit.`);
  const rows = seen ? [
    ...Object.entries(policy.hit_share).map(([order, share]) => ({ times: 1, order, share })),
    ...Object.entries(policy.lru_hit_share_by_size).map(([times, share]) => ({ times: Number(times), order: "lru", share })),
  ] : [];
  rows.sort((one, other) => one.times - other.times || (one.order < other.order ? -1 : 1));
  keyed(byId("what-if").tBodies[0], rows, ({ times, order }) => `${times} ${order}`, () => make("tr"), (row, { times, order, share }) => {
    const gain = 100 * (share - policy.hit_share[policy.order]);
    const more = Math.abs(gain) < 0.05 ? "0" : `${gain > 0 ? "+" : "−"}${Math.abs(gain).toFixed(1)}`;
    cells(row, [`${size(times * pool_bytes)}${times === 1 ? " (now)" : ""}`, order, percent(share), more], new Set([2, 3]));
  });
}

// --- misses ----------------------------------------------------------------------------------------------------

let reasons = {};

export function knowReasons(told) {
  reasons = told;
}

export function helpFor(reason) {
  return Object.values(reasons).find((each) => each.word === reason)?.helps ?? "";
}

function showMisses(status) {
  const misses = Object.entries(status.traffic.lookups.misses).sort((one, other) => other[1] - one[1]);
  const most = misses.length ? misses[0][1] : 1;
  byId("no-misses").hidden = misses.length > 0;
  keyed(byId("misses"), misses, ([name]) => name, missed, (row, [, number]) => {
    const [, bar, figure] = row.firstChild.children;
    bar.firstChild.style.width = `${(100 * number) / most}%`;
    setText(figure, count(number));
  });
}

function missed([name]) {
  const about = reasons[name] ?? { word: name, means: "", helps: "" };
  const explained = about.word === name ? "" : ` (lmcache-core explain says ${about.word})`;
  return make("details", { id: `miss-${name}` },
    make("summary", {},
      make("span", { textContent: name }), make("span", { className: "bar" }, make("div")), make("span", { className: "figure" })),
    make("p", { className: "means" }, `What happened: ${about.means}${explained}.`),
    make("p", { className: "helps" }, "What helps: ", ...prose(about.helps || "there is nothing to do."),
    ));
}

// --- tables ----------------------------------------------------------------------------------------------------

function showStores(status, actions) {
  const dirty = status.tiers?.stores.dirty ?? {};
  const stores = [
    {
      name: "l1", used: status.l1.used_bytes, most: status.l1.pool_bytes, objects: status.l1.objects_by_state.ready,
      loaded: null, stored: status.counters.stored_objects ?? 0, evicted: status.l1.counters.evictions, waiting: null,
      state: status.server.draining ? "draining" : "in use", error: "", tier: null,
    },
    ...tiersOf(status).map((tier) => ({
      name: tier.name, used: tier.bytes_used, most: tier.capacity_bytes, objects: tier.objects,
      loaded: tier.counts.loaded ?? 0, stored: tier.counts.store_done ?? 0, evicted: tier.deletes.evicted,
      waiting: dirty[tier.name] ?? 0, state: stateOf(tier), error: tier.last_error || tier.deletes.last_error, tier,
    })),
  ];
  keyed(byId("stores").tBodies[0], stores, (store) => store.name, () => make("tr"), (row, store) => {
    const figure = (value) => (value === null ? "" : count(value));
    if (!row.cells.length) {
      row.append(...["named", "", "figure", "figure", "figure", "figure", "figure", "", "changes"].map((className) => make("td", { className })));
      row.cells[7].append(make("span"), make("div", { className: "said-there" }));
      if (store.tier) row.cells[8].append(make("button", { type: "button" }));
    }
    const share = store.most ? store.used / store.most : null;
    const room = store.most ? ` of ${size(store.most)}, ${percent(share)}` : "";
    setText(row.cells[0], store.name);
    setBar(row.cells[1], share, `${size(store.used)}${room}`);
    [store.objects, store.loaded, store.stored, store.evicted, store.waiting].forEach((value, at) => setText(row.cells[at + 2], figure(value)));
    setText(row.cells[7].children[0], store.state);
    setText(row.cells[7].children[1], store.error);
    if (store.tier) {
      const button = row.cells[8].firstChild;
      setText(button, store.tier.draining ? "Use again" : "Drain");
      button.onclick = () => actions.drain(store.name, store.tier.draining);
    }
  });
}

function stateOf(tier) {
  const stopped = ["reads", "writes"].filter((what) => tier[what].breaker !== "closed");
  const said = [tier.draining ? "draining" : "in use"];
  if (stopped.length) said.push(`${stopped.join(" and ")} not called: circuit breaker open`);
  return said.join(", ");
}

function showNamespaces(status) {
  const rows = Object.entries(status.namespaces);
  byId("no-namespaces").hidden = rows.length > 0;
  byId("namespaces").hidden = rows.length === 0;
  keyed(byId("namespaces").tBodies[0], rows, ([id]) => id, () => make("tr"), (row, [id, told]) => {
    const asked = status.traffic.namespaces[id] ?? { lookup_keys: 0, lookup_hits: 0, retrieve_bytes: 0, prompt_tokens: 0 };
    const inTokens = asked.prompt_tokens > 0; // engines look prompts up in it
    const [looked, found] = inTokens ? [asked.prompt_tokens, asked.prompt_hit_tokens] : [asked.lookup_keys, asked.lookup_hits];
    const unit = inTokens ? " tokens" : "";
    cells(row, [
      told.label || "–", told.layout, count(told.sessions), count(looked) + unit, count(found) + unit, size(asked.retrieve_bytes), id,
    ], new Set([2, 3, 4, 5]));
    row.cells[6].className = "named";
  });
}

function showTenants(status, actions) {
  const rows = [["l1", status.l1.tenants], ...tiersOf(status).map((tier) => [tier.name, tier.tenants])].flatMap(
    ([store, tenants]) => tenants.map((tenant) => ({ store, ...tenant })));
  rows.sort((one, other) => (one.name < other.name ? -1 : one.name > other.name ? 1 : 0));
  byId("no-tenants").hidden = rows.length > 0;
  byId("tenants").hidden = rows.length === 0;
  keyed(byId("tenants").tBodies[0], rows, (row) => `${row.name}\n${row.store}`, () => make("tr"), (row, told) => {
    if (!row.cells.length) {
      row.append(...["", "named", "", "figure", "figure", "figure", "changes"].map((className) => make("td", { className })));
      if (told.name) {
        row.cells[6].append(make("button", { type: "button", textContent: "Edit" }), make("button", { type: "button", textContent: "End" }));
      }
    }
    const sizeOr = (nbytes) => (nbytes === null ? "none" : size(nbytes));
    const share = told.limit_bytes === null ? null : told.limit_bytes ? told.used_bytes / told.limit_bytes : 1;
    setText(row.cells[0], told.name || "(others)");
    setText(row.cells[1], told.store);
    setBar(row.cells[2], share, share === null ? "" : percent(share));
    [told.used_bytes, told.reserved_bytes, told.limit_bytes].forEach((value, at) => setText(row.cells[at + 3], sizeOr(value)));
    if (told.name) {
      row.cells[6].children[0].onclick = () => actions.editQuota(told);
      row.cells[6].children[1].onclick = () => actions.endQuota(told.name);
    }
  });
}

function showHolders(status) {
  const holders = Object.entries(status.l1.holders);
  keyed(byId("holders").tBodies[0], holders, ([name]) => name, () => make("tr"), (row, [name, held]) => cells(row, [
    name, count(held.connections), size(held.promised_bytes), size(held.read_bytes), size(held.pinned_bytes), size(held.quarantined_bytes),
  ], new Set([1, 2, 3, 4, 5])));
  keyed(byId("clients").tBodies[0], status.sessions, (client) => String(client.id), () => make("tr"), (row, client) => cells(row, [
    client.name, client.state, client.carrier, String(client.pid), client.origin,
  ], new Set([3])));
}

// --- events ----------------------------------------------------------------------------------------------------

export function showEvent(event) {
  const { event: name, at_s, ...others } = event;
  const at = at_s === undefined ? "" : new Date(1e3 * at_s).toLocaleTimeString();
  const row = make("tr", {}, ...[at, name, aboutOf(others)].map((textContent) => make("td", { textContent })));
  row.cells[0].className = row.cells[1].className = "named";
  const body = byId("events").tBodies[0];
  body.prepend(row);
  headed(row);
  while (body.rows.length > EVENTS_SHOWN) body.lastChild.remove();
}

function aboutOf(fields) {
  return Object.entries(fields).filter(([, value]) => value !== null && value !== "").map(([name, value]) => {
    if (name === "keys" && Array.isArray(value)) return keysOf(value, fields.more_keys ?? 0);
    if (name === "more_keys") return "";
    if (name === "nbytes") return size(value);
    return `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`;
  }).filter(Boolean).join(", ");
}

function keysOf(keys, more) {
  const shown = keys.slice(0, KEYS_SHOWN).map((key) => `${String(key).slice(0, 8)}…`);
  const number = keys.length + more;
  return `${count(number)} ${number === 1 ? "key" : "keys"}${shown.length ? `: ${shown.join(" ")}` : ""}${number > KEYS_SHOWN ? " …" : ""}`;
}

// The changes that this page can make. The server decides; its answers are shown.

import { ask } from "./ask.js";
import { byId, keyed, make, setText } from "./dom.js";
import { tiersOf } from "./history.js";
import { count, parseSize, size } from "./units.js";

export class Actions {
  // `done` is called after each change.
  constructor(done) {
    this.done = done;
    this.#form("clear", (fields) => this.#clear(fields));
    this.#form("pin", (fields) => this.#pin(fields));
    this.#form("quota", (fields) => this.#setQuota(fields));
  }

  // The stores to choose from.
  know(status) {
    const stores = ["l1", ...tiersOf(status).map((tier) => tier.name)];
    keyed(byId("quota").elements.store, stores, (name) => name, (name) => make("option", { value: name, textContent: name }), () => {});
  }

  async drain(tier, again) {
    if (!again && !(await sure(`Store nothing more on ${tier}? It still serves its objects.`))) return;
    await this.#change("POST", `tiers/${encodeURIComponent(tier)}`, { action: again ? "reconfigure" : "drain" },
      () => (again ? `${tier} takes stores again` : `${tier} is draining`));
  }

  editQuota(told) {
    const { elements } = byId("quota");
    elements.tenant.value = told.name;
    elements.namespaces.value = "";
    elements.store.value = told.store;
    elements.reserved_bytes.value = told.reserved_bytes ?? "";
    elements.limit_bytes.value = told.limit_bytes ?? "";
    elements.limit_bytes.focus();
  }

  async endQuota(tenant) {
    if (!(await sure(`Remove all quotas of ${tenant}? Its objects stay.`))) return;
    await this.#change("DELETE", `quota/${encodeURIComponent(tenant)}`, undefined, () => `${tenant} has no quota any more`);
  }

  async #clear({ namespace, tiers }) {
    const what = namespace ? `everything of namespace ${namespace}` : "everything";
    const where = tiers ? "the pool and all tiers" : "the pool";
    if (!(await sure(`Clear ${what} from ${where}?`))) return;
    await this.#change("POST", "clear", { namespace: namespace || null, tiers: Boolean(tiers) },
      (told) => `cleared: ${count(told.objects)} objects, ${size(told.nbytes)}`);
  }

  async #pin({ namespace, keys, dtype, shape, memory_format, ttl_s }) {
    const body = {
      namespace, dtype, memory_format, keys: keys.split(/[\s,]+/).filter(Boolean), shape: shape.split(",").map(Number), ttl_s: Number(ttl_s),
    };
    await this.#change("POST", "pin", body, (words) => {
      const counts = new Map();
      for (const word of words) counts.set(word, (counts.get(word) ?? 0) + 1);
      return `pin: ${[...counts].map(([word, number]) => `${number} ${word}`).join(", ")}`;
    });
  }

  async #setQuota({ tenant, namespaces, store, reserved_bytes, limit_bytes }) {
    const figures = { reserved_bytes: parseSize(reserved_bytes), limit_bytes: parseSize(limit_bytes) };
    const ids = namespaces.split(/[\s,]+/).filter(Boolean);
    await this.#change("PUT", `quota/${encodeURIComponent(tenant)}`, { namespaces: ids.length ? ids : null, stores: { [store]: figures } },
      () => `the quota of ${tenant} on ${store} is set`);
  }

  async #change(method, path, body, words) {
    say(words(await ask(path, { method, body })));
    this.done();
  }

  #form(id, submit) {
    byId(id).addEventListener("submit", (event) => {
      event.preventDefault();
      attempt(() => submit(Object.fromEntries(new FormData(event.target))));
    });
  }
}

// Make the change; if it fails, show why.
export async function attempt(work) {
  try {
    await work();
  } catch (error) {
    say(error instanceof TypeError ? "no answer: the change may not have been made" : error.message);
  }
}

function say(text) {
  byId("said").hidden = false;
  setText(byId("said"), text);
}

function sure(question) {
  const dialog = byId("sure");
  setText(byId("sure-text"), question);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((answer) => {
    dialog.addEventListener("close", () => answer(dialog.returnValue === "yes"), { once: true });
  });
}

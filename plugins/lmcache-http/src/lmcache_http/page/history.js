// The data of the charts: differences between two answers of /status.

const KEPT = 900; // points, of two seconds each
const MINUTE_S = 60;

const CHARTS = [
  { id: "fill", title: "Fill", unit: "share", top: 1, point: fill },
  { id: "hits", title: "Hit rate of lookups", unit: "share", top: 1, point: hits },
  { id: "latency", title: "Latency, mean", unit: "seconds", point: latency },
  { id: "bytes", title: "Bytes a second", unit: "bytes", point: bytes },
  { id: "evictions", title: "Evictions a second", unit: "count", point: evictions },
];

export const tiersOf = (status) => status.tiers?.tiers ?? [];

export class History {
  constructor() {
    this.times = [];
    this.points = [];
    this.recent = []; // [seconds, status] of the last minute
  }

  // A new answer, received at `at_s`. The first one after a restart of the server starts over.
  add(status, at_s) {
    const last = this.recent.at(-1);
    const same = last && last[1].pool.boot_id === status.pool.boot_id && last[1].server.uptime_s <= status.server.uptime_s;
    const before = same ? last[1] : null;
    const elapsed_s = same ? status.server.uptime_s - before.server.uptime_s : 0;
    if (same && elapsed_s === 0) return; // the same answer again
    if (!same) this.recent = [];
    this.recent.push([at_s, status]);
    while (this.recent.length > 2 && at_s - this.recent[1][0] >= MINUTE_S) this.recent.shift();
    this.times.push(at_s);
    this.points.push(CHARTS.map((chart) => chart.point(status, before, elapsed_s)));
    if (this.times.length > KEPT) {
      this.times.shift();
      this.points.shift();
    }
  }

  // [chart, times, {name: values}] for each chart that has something to show.
  drawn() {
    return CHARTS.map((chart, at) => {
      const names = [...new Set(this.points.flatMap((point) => Object.keys(point[at])))];
      return [chart, this.times, Object.fromEntries(names.map((name) => [name, this.points.map((point) => point[at][name] ?? null)]))];
    });
  }

  // The growth of a figure a second, over the last minute. null before there are two answers.
  rate(figure) {
    const [first, last] = [this.recent[0], this.recent.at(-1)];
    const elapsed_s = first ? last[1].server.uptime_s - first[1].server.uptime_s : 0;
    return elapsed_s > 0 ? (figure(last[1]) - figure(first[1])) / elapsed_s : null;
  }

  // The hit rate of the last minute's lookups; null if there were none.
  hitRate() {
    const keys = this.rate((status) => status.traffic.lookups.keys);
    return keys ? this.rate((status) => status.traffic.lookups.hits) / keys : null;
  }
}

function fill(status) {
  const found = { l1: status.l1.used_bytes / status.l1.pool_bytes };
  for (const tier of tiersOf(status)) {
    if (tier.capacity_bytes) found[tier.name] = tier.bytes_used / tier.capacity_bytes;
  }
  return found;
}

function hits(status, before) {
  if (!before) return {};
  const [now, then] = [status.traffic.lookups, before.traffic.lookups];
  const keys = now.keys - then.keys;
  if (!keys) return {};
  const loaded = now.loaded - then.loaded;
  const found = { all: (now.hits - then.hits) / keys, l1: (now.hits - then.hits - loaded) / keys };
  for (const [tier, number] of Object.entries(now.loaded_from)) {
    found[tier] = (number - (then.loaded_from[tier] ?? 0)) / keys;
  }
  return found;
}

function latency(status, before) {
  if (!before) return {};
  const found = {};
  const mean = (name, seconds, calls) => {
    if (calls > 0) found[name] = seconds / calls;
  };
  const [now, then] = [status.traffic.lookups, before.traffic.lookups];
  mean("lookup in the index", now.seconds_by_index - then.seconds_by_index, now.calls_by_index - then.calls_by_index);
  mean("lookup with tiers", now.waited.seconds - then.waited.seconds, total(now.waited) - total(then.waited));
  for (const tier of tiersOf(status)) {
    const former = tiersOf(before).find((other) => other.name === tier.name);
    if (!former) continue;
    for (const what of ["load", "store"]) {
      const [new_, old] = [tier.latencies[what], former.latencies[what]];
      mean(`${tier.name} ${what}`, new_.seconds - old.seconds, total(new_) - total(old));
    }
  }
  return found;
}

function bytes(status, before, elapsed_s) {
  if (!before) return {};
  const found = {
    read: (status.traffic.retrieves.bytes - before.traffic.retrieves.bytes) / elapsed_s,
    stored: ((status.counters.stored_bytes ?? 0) - (before.counters.stored_bytes ?? 0)) / elapsed_s,
  };
  for (const tier of tiersOf(status)) {
    const former = tiersOf(before).find((other) => other.name === tier.name)?.counts ?? {};
    found[`from ${tier.name}`] = ((tier.counts.loaded_bytes ?? 0) - (former.loaded_bytes ?? 0)) / elapsed_s;
    found[`to ${tier.name}`] = ((tier.counts.stored_bytes ?? 0) - (former.stored_bytes ?? 0)) / elapsed_s;
  }
  return found;
}

function evictions(status, before, elapsed_s) {
  if (!before) return {};
  const found = { l1: (status.l1.counters.evictions - before.l1.counters.evictions) / elapsed_s };
  for (const tier of tiersOf(status)) {
    const former = tiersOf(before).find((other) => other.name === tier.name);
    if (former) found[tier.name] = (tier.deletes.evicted - former.deletes.evicted) / elapsed_s;
  }
  return found;
}

function total(histogram) {
  return histogram.counts.reduce((sum, each) => sum + each, 0);
}

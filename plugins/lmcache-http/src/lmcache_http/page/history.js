// The data of the charts, from /history, and the answers of /status in the last minute.

const KEPT_S = 3600;
const GAP_S = 30; // nothing is drawn: the process, or its server, was away
const MINUTE_S = 60;

export const tiersOf = (status) => status.tiers?.tiers ?? [];

export class History {
  constructor() {
    this.times = [];
    this.charts = [];
    this.recent = []; // [seconds, status] of the last minute
  }

  get last() {
    return this.times.at(-1) ?? 0;
  }

  // What /history has after the last point. Lines without a value in the past hour go.
  append({ times, charts }) {
    if (!times.length) return;
    if (this.last && times[0] - this.last > GAP_S) this.append({ times: [this.last + 1], charts: charts.map((chart) => ({ ...chart, series: {} })) });
    const former = new Map(this.charts.map((chart) => [chart.id, chart.series]));
    const old = this.times.filter((at) => at < times.at(-1) - KEPT_S).length;
    const [past, fresh] = [this.times.slice(old).map(() => null), times.map(() => null)];
    this.times = [...this.times.slice(old), ...times];
    this.charts = charts.map((chart) => {
      const there = former.get(chart.id) ?? {};
      const lines = Object.keys({ ...there, ...chart.series })
        .map((name) => [name, [...(there[name]?.slice(old) ?? past), ...(chart.series[name] ?? fresh)]])
        .filter(([, values]) => values.some((value) => value !== null));
      return { ...chart, series: Object.fromEntries(lines) };
    });
  }

  // A new answer, received at `at_s`. The first one after a restart of the server starts over.
  add(status, at_s) {
    const last = this.recent.at(-1)?.[1];
    const same = last && last.pool.boot_id === status.pool.boot_id && last.server.uptime_s <= status.server.uptime_s;
    if (same && last.server.uptime_s === status.server.uptime_s) return; // the same answer again
    if (!same) this.recent = [];
    this.recent.push([at_s, status]);
    while (this.recent.length > 2 && at_s - this.recent[1][0] >= MINUTE_S) this.recent.shift();
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

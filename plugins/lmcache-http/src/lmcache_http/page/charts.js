// The charts, by uPlot. A chart is recreated when its lines, or the colours, change.

import { make } from "./dom.js";
import { count, milliseconds, percent, size } from "./units.js";

const WRITE = { share: percent, seconds: milliseconds, bytes: size, count };
const LEAST = { seconds: 0.001, bytes: 1024, count: 1 }; // the range of an axis without data
const HEIGHT = 180;
const COLOURS = 8;
const dark = matchMedia("(prefers-color-scheme: dark)");

export class Charts {
  constructor(parent) {
    this.parent = parent;
    this.charts = new Map();
    dark.addEventListener("change", () => this.#forget());
    new ResizeObserver(() => {
      for (const { plot, box } of this.charts.values()) plot?.setSize({ width: box.clientWidth, height: HEIGHT });
    }).observe(parent);
  }

  show({ times, charts }) {
    for (const { series, ...chart } of charts) {
      let kept = this.charts.get(chart.id);
      if (!kept) {
        const box = make("div");
        this.parent.append(make("figure", { id: `chart-${chart.id}` }, make("figcaption", { textContent: chart.title }), box));
        this.charts.set(chart.id, kept = { box, plot: null, names: "" });
      }
      const names = JSON.stringify(Object.keys(series));
      const data = [times, ...Object.values(series)];
      if (kept.plot && kept.names === names) kept.plot.setData(data);
      else {
        kept.plot?.destroy();
        kept.plot = new uPlot(options(chart, Object.keys(series), kept.box.clientWidth), data, kept.box);
        kept.names = names;
      }
      kept.box.parentElement.dataset.points = times.length;
    }
  }

  #forget() {
    for (const kept of this.charts.values()) kept.names = "";
  }
}

function clock(at_s) {
  return new Date(1e3 * at_s).toLocaleTimeString([], { hour12: false });
}

function options(chart, names, width) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const write = (plot, value) => (value === null || value === undefined ? "–" : WRITE[chart.unit](value));
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
  return {
    width,
    height: HEIGHT,
    scales: { y: { range: (plot, least, most) => [0, chart.top ?? 1.1 * Math.max(most ?? 0, LEAST[chart.unit])] } },
    axes: [{ ...axis, space: 90, values: (plot, ticks) => ticks.map(clock) }, { ...axis, size: 72, values: (plot, ticks) => ticks.map((tick) => WRITE[chart.unit](tick)) }],
    series: [
      { label: "at", value: (plot, at) => (at === null ? "–" : clock(at)) },
      ...names.map((label, at) => ({
        label, value: write, stroke: colour(`--chart-${at % COLOURS}`), width: 2, points: { size: 4 },
      })),
    ],
  };
}

// Figures for people, as `lmcache-core status` writes them.

const SIZES = ["B", "KiB", "MiB", "GiB", "TiB"];

export function size(nbytes) {
  let unit = 0;
  while (nbytes >= 1024 && unit < SIZES.length - 1) {
    nbytes /= 1024;
    unit += 1;
  }
  return `${unit ? nbytes.toFixed(1) : Math.round(nbytes)} ${SIZES[unit]}`;
}

export function count(value) {
  return value.toLocaleString("en-US", { maximumFractionDigits: value && Math.abs(value) < 10 && value % 1 ? 1 : 0 });
}

export function percent(share) {
  return share === null ? "none yet" : `${(100 * share).toFixed(1)}%`;
}

export function milliseconds(seconds) {
  const ms = 1e3 * seconds;
  if (ms === 0) return "0";
  return ms < 1 ? `${(1e3 * ms).toFixed(ms < 0.01 ? 1 : 0)} µs` : `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
}

export function duration(seconds) {
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= 2 * length) return `${Math.round(seconds / length)} ${unit}`;
  }
  return `${Math.round(seconds)} s`;
}

// "10 GiB", "1.5tb" or a plain number; null for nothing. Throws if it is not a size.
export function parseSize(text) {
  if (!text.trim()) return null;
  const found = /^([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?$/i.exec(text.trim());
  if (!found) throw new Error(`${text} is not a size: write a number of bytes, or one with KiB, MiB, GiB or TiB`);
  const power = found[2] ? "KMGT".indexOf(found[2].toUpperCase()) + 1 : 0;
  return Math.floor(Number(found[1]) * (found[3] ? 1024 : 1000) ** power);
}

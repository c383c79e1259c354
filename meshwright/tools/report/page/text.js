// Quantities and names as people read them.

const UNITS_S = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]];
const UNITS_B = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

function digits(value, count = 3) {
  return Number(value.toPrecision(count)).toLocaleString("en", { maximumFractionDigits: 6 });
}

function seconds(value) {
  for (const [unit, scale] of UNITS_S) {
    if (Math.abs(value) >= scale) return `${digits(value / scale)} ${unit}`;
  }
  return value ? `${digits(value / 1e-6, 2)} µs` : "0";
}

function bytes(value) {
  for (const [unit, scale] of UNITS_B) {
    if (Math.abs(value) >= scale) return `${digits(value / scale)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

function percent(share, count = 0) {
  return `${(100 * share).toFixed(count)}%`;
}

function whole(value) {
  return value.toLocaleString("en");
}

function plural(count, one, many = `${one}s`) {
  return `${whole(count)} ${count === 1 ? one : many}`;
}

// 0-3, 8 for [0, 1, 2, 3, 8]
function ranges(numbers) {
  const runs = [];
  for (const n of [...numbers].sort((a, b) => a - b)) {
    const last = runs[runs.length - 1];
    if (last && n === last[1] + 1) last[1] = n;
    else runs.push([n, n]);
  }
  return runs.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(", ");
}

// `stage 3`, `stages 0-3, 8`, or how many there are between which where that is shorter.
function which(one, numbers) {
  if (numbers.length === 1) return `${one} ${numbers[0]}`;
  const text = ranges(numbers);
  return text.split(",").length < 5 ? `${one}s ${text}`
    : `${numbers.length} ${one}s of ${Math.min(...numbers)}-${Math.max(...numbers)}`;
}

// Pipeline ranks; where there is one, it is all there is.
function pipelineRanks(numbers) {
  return DATA.ranks.length === 1 ? "every rank" : which("rank", numbers);
}

const SECONDS_OF = {
  forward: "forward", backward: "backward", recompute: "recompute",
  tensor: "collectives in blocks", wait: "waiting", gradients: "gradients",
  gather: "gathering parameters", optimizer: "optimizer", overhead: "overhead",
  offload: "copies to host",
};

const WORK_NAMES = ["forward", "backward", "backward, inputs", "backward, weights",
  "completing gradients", "optimizer", "publishing parameters"];
const WORK_COLOURS = ["forward", "backward", "backward", "weight", "gradients", "optimizer", "gather"];

// Steps of a scale that people like, at most `most` of them.
function ticks(low, high, most) {
  const raw = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return found;
}

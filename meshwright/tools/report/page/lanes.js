// Which rows of the timeline are drawn, and where: pipeline ranks, predicted and measured, and those of another plan.

function lanes(stage, mode) {
  const t = DATA.timeline;
  const found = [];
  const others = mode === "all" || mode === OTHER;
  const add = (ranks, rank, bars, kind) => {
    if (!bars || !bars.length || (stage >= 0 && !ranks[rank].stages.includes(stage))) return;
    found.push({ rank, ranks, bars, measured: kind === "measured", other: kind === OTHER });
  };
  const count = Math.max(t.ranks.length, others ? t.beside_ranks.length : 0);
  for (let row = 0; row < count; row += 1) {
    if (row < t.ranks.length && mode !== OTHER) {
      if (mode !== "measured") add(DATA.ranks, t.ranks[row], t.predicted[row], "predicted");
      if (mode !== "predicted") add(DATA.ranks, t.ranks[row], t.measured[row], "measured");
    }
    if (others && row < t.beside_ranks.length) add(DATA.beside.ranks, t.beside_ranks[row], t.beside[row], OTHER);
  }
  return found;
}

const OTHER = "the other plan";

function laneWords(lane) {
  const whose = lane.other ? `${OTHER}, ` : lane.measured ? "measured, " : "";
  return `${whose}pipeline rank ${lane.rank}, devices ${lane.ranks[lane.rank].devices}`;
}

// Of an action, the share that its rank waits for collectives inside blocks; as predicted.
function collectiveShare(lane, kind, stage) {
  const shares = lane.other ? DATA.timeline.beside_collectives : DATA.timeline.collectives;
  return !lane.measured && stage >= 0 && kind < 4 && shares[stage] ? shares[stage][kind] : 0;
}

// The first bar that ends after a time; bars are in order of time.
function firstAfter(bars, time) {
  let low = 0;
  let high = bars.length / 5;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (bars[5 * mid + 4] > time) high = mid;
    else low = mid + 1;
  }
  return low;
}

function barAt(lane, time) {
  const i = 5 * firstAfter(lane.bars, time);
  return i < lane.bars.length && lane.bars[i + 3] <= time ? lane.bars.slice(i, i + 5) : null;
}

function tellBar(lane, bar) {
  const t = DATA.timeline;
  const scale = t.span_s / t.ticks;
  const [kind, stage, microbatch, start, end] = bar;
  const lines = [WORK_NAMES[kind]];
  if (stage >= 0) lines[0] += `, stage ${stage}, micro-batch ${microbatch}`;
  lines.push(`${seconds((end - start) * scale)}, from ${seconds(start * scale)} to ${seconds(end * scale)}`);
  const share = collectiveShare(lane, kind, stage);
  if (share) lines.push(`of it ${seconds(share * (end - start) * scale)} in collectives inside blocks (${percent(share)})`);
  lines.push(laneWords(lane));
  return lines.join("\n");
}

// Draws one lane between pixel columns `left` and `right`.
function drawLane(pen, lane, look, box, palette) {
  const perTick = (box.right - box.left) / (look.to - look.from);
  const bars = lane.bars;
  let drawn = -1;
  for (let n = firstAfter(bars, look.from); 5 * n < bars.length; n += 1) {
    const [kind, stage, microbatch, start, end] = bars.slice(5 * n, 5 * n + 5);
    if (start > look.to) break;
    const x0 = Math.max(box.left, box.left + (start - look.from) * perTick);
    const x1 = Math.min(box.right, box.left + (end - look.from) * perTick);
    if (x1 - drawn < 0.35) continue;
    drawn = x1;
    const faded = look.stage >= 0 && stage !== look.stage && stage >= 0;
    const second = lane.ranks[lane.rank].stages.indexOf(stage) % 2 === 1;
    pen.globalAlpha = (faded ? 0.15 : 1) * (microbatch % 2 === 1 ? 0.78 : 1) * (second ? 0.82 : 1);
    pen.fillStyle = palette[kind];
    const gap = x1 - x0 > 3 && box.height > 3 ? 0.6 : 0;
    pen.fillRect(x0, box.top, Math.max(0.6, x1 - x0 - gap), box.height);
    const share = collectiveShare(lane, kind, stage);
    if (share && box.height > 5) {
      const high = Math.max(2, Math.round(box.height / 4));
      const full = (end - start) * perTick;
      const shown = Math.min(x1 - gap, box.left + (start - look.from) * perTick + share * full) - x0;
      pen.globalAlpha = faded ? 0.15 : 1;
      pen.fillStyle = palette.tensor;
      if (shown > 0) pen.fillRect(x0, box.top + box.height - high, shown, high);
    }
    if (!faded) label(pen, lane, [stage, microbatch], x0, x1, box, palette);
  }
  pen.globalAlpha = 1;
}

function label(pen, lane, [stage, microbatch], x0, x1, box, palette) {
  if (stage < 0 || box.height < 12 || x1 - x0 < 15) return;
  const text = lane.ranks[lane.rank].stages.length > 1 && x1 - x0 > 34
    ? `${stage}:${microbatch}` : `${microbatch}`;
  pen.globalAlpha = 1;
  pen.fillStyle = palette.text;
  pen.fillText(text, (x0 + x1) / 2, box.top + box.height / 2 + 0.5, x1 - x0 - 2);
}

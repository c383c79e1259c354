// The pipeline timeline on a canvas: rows are pipeline ranks, their height adapts to how many.

const chart = { mode: "predicted", rowHeight: 0, lanes: [], selected: null };
const VIEW_HEIGHT = 480;
const AXIS = 26;

function timelineSection() {
  const t = DATA.timeline;
  if (modes().length > 1) chart.mode = "all";
  chart.canvas = el("canvas", { id: "timeline-canvas", tabindex: 0, role: "img",
    "aria-label": `Timeline of ${plural(DATA.ranks.length, "pipeline rank")} over ${seconds(t.span_s)}` });
  chart.inner = el("div", {}, chart.canvas);
  chart.box = el("div", { class: "lanes", onscroll: paint }, chart.inner);
  const place = (event) => {
    const box = chart.canvas.getBoundingClientRect();
    const g = gutter();
    const share = (event.clientX - box.left - g) / (box.width - g);
    return view.from + Math.max(0, Math.min(1, share)) * (view.to - view.from);
  };
  gestures(chart.canvas, place, (a, b) => { chart.selected = a === null ? null : [a, b]; paint(); });
  chart.canvas.addEventListener("pointermove", (event) => hover(event, place(event)));
  chart.canvas.addEventListener("pointerleave", hideTip);
  view.listeners.push(paint);
  onFilter(arrange);
  new ResizeObserver(arrange).observe(chart.box);
  const used = [...new Set(t.predicted.concat(t.measured, t.beside).flatMap(kindsOf))].sort();
  const strips = t.collectives.concat(t.beside_collectives).flat().some((share) => share > 0);
  return section("timeline", "Timeline of a step", timelineWords(), timelineTools(),
    el("div", { class: "stagebox" }, chart.box),
    legend(used.map((kind) => [WORK_COLOURS[kind], WORK_NAMES[kind]])
      .filter(([name], i, all) => all.findIndex(([n]) => n === name) === i)
      .concat(strips ? [["tensor", "strip at the foot of an action: its share in collectives inside blocks"]] : [])));
}

// What rows there are to choose from.
function modes() {
  const t = DATA.timeline;
  return ["predicted", t.measured.length && "measured", t.beside.length && OTHER].filter(Boolean);
}

function kindsOf(bars) {
  const found = new Set();
  for (let i = 0; i < bars.length; i += 5) found.add(bars[i]);
  return [...found];
}

function timelineWords() {
  const t = DATA.timeline;
  const keys = "Numbers are micro-batches. Drag to zoom, double-click for all; Ctrl + wheel, + and −, arrows.";
  if (DATA.ranks.length === 1) return `One stage: all ranks do the same. ${keys}`;
  const rows = t.left_out ? `${whole(t.ranks.length)} of ` : "";
  return `${rows}${plural(DATA.ranks.length, "pipeline rank")}, ${plural(t.stages, "stage")}; `
    + `${percent(t.bubble, 1)} of the pipeline's rank-seconds are idle. ${keys}`;
}

function timelineTools() {
  const known = modes();
  const buttons = (known.length > 1 ? [...known, "all"] : []).map((mode) => el("button", { text: mode, "aria-pressed": `${mode === chart.mode}`,
    onclick: () => {
      chart.mode = mode;
      buttons.forEach((b) => b.setAttribute("aria-pressed", `${b.textContent === mode}`));
      arrange();
    } }));
  const many = DATA.ranks.length > 24;
  const taller = (factor) => () => { chart.rowHeight = rowHeight() * factor; arrange(); };
  return el("div", { class: "tools" }, buttons, el("span", { class: "gap" }),
    el("button", { text: "zoom in", id: "zoom-in", onclick: () => zoom(2) }),
    el("button", { text: "zoom out", onclick: () => zoom(0.5) }),
    el("button", { text: "whole step", id: "zoom-all", onclick: lookAtAll }),
    el("button", { text: "open in Perfetto", id: "perfetto", onclick: openInPerfetto,
      title: "opens ui.perfetto.dev and hands it this timeline; it stays in your browser" }),
    el("button", { text: "save trace", id: "save-trace", onclick: saveTrace, title: "the timeline as a Chrome trace" }),
    many && el("button", { text: "taller rows", onclick: taller(1.6) }),
    many && el("button", { text: "lower rows", onclick: taller(1 / 1.6) }));
}

function gutter() {
  return chart.box.clientWidth < 560 ? 58 : 150;
}

function rowHeight() {
  const fit = (VIEW_HEIGHT - AXIS) / Math.max(1, chart.lanes.length);
  if (chart.printing) return Math.min(30, fit);
  return Math.min(60, Math.max(0.4, chart.rowHeight || Math.max(2, Math.min(38, fit))));
}

function arrange() {
  chart.lanes = lanes(filter.stage, chart.mode);
  const wanted = chart.lanes.length * rowHeight() + AXIS;
  chart.height = Math.ceil(Math.min(VIEW_HEIGHT, Math.max(64, wanted)));
  chart.box.style.height = `${chart.height}px`;
  chart.inner.style.height = `${Math.max(chart.height, Math.ceil(wanted))}px`;
  chart.canvas.style.height = `${chart.height}px`;
  paint();
}

function paint() {
  const width = chart.box.clientWidth;
  if (!width || !chart.height) return;
  const density = chart.printing ? 3 : Math.max(1, devicePixelRatio || 1);
  chart.canvas.width = Math.round(width * density);
  chart.canvas.height = Math.round(chart.height * density);
  const pen = chart.canvas.getContext("2d");
  pen.scale(density, density);
  pen.clearRect(0, 0, width, chart.height);
  const palette = WORK_COLOURS.map(colour);
  palette.text = colour("on-bar");
  palette.tensor = colour("tensor");
  const box = { left: gutter(), right: width, top: AXIS };
  rows(pen, box, palette);
  scale(pen, box);
  marks(pen, box);
}

function rows(pen, box, palette) {
  const height = rowHeight();
  const top = chart.printing ? 0 : chart.box.scrollTop;
  const first = Math.floor(top / height);
  const last = Math.min(chart.lanes.length, Math.ceil((top + chart.height) / height));
  const look = { from: view.from, to: view.to, stage: filter.stage };
  const inset = height > 8 ? 1.5 : height > 4 ? 0.5 : 0;
  pen.save();
  pen.beginPath();
  pen.rect(0, AXIS, box.right, chart.height - AXIS);
  pen.clip();
  for (let n = first; n < last; n += 1) {
    const y = AXIS + n * height - top;
    const place = { ...box, top: y + inset, height: height - 2 * inset };
    pen.fillStyle = colour("track");
    pen.fillRect(box.left, place.top, box.right - box.left, place.height);
    pen.font = `${Math.min(12, Math.max(8, place.height - 5))}px system-ui, sans-serif`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    drawLane(pen, chart.lanes[n], look, place, palette);
    rowName(pen, chart.lanes[n], n, place, box);
  }
  pen.restore();
}

function rowName(pen, lane, n, place, box) {
  const every = Math.ceil(14 / rowHeight());
  if (n % every) return;
  pen.font = "12px system-ui, sans-serif";
  pen.textAlign = "right";
  pen.fillStyle = colour(lane.measured || lane.other ? "ink" : "soft");
  const rank = lane.ranks[lane.rank];
  const wide = box.left > 100;
  const whose = lane.other ? "other" : "";
  const name = lane.measured ? "measured" : wide && rowHeight() >= 10
    ? `${lane.ranks.length > 1 ? `${lane.rank} · ` : ""}${whose || "devices"} ${rank.devices}` : `${whose} ${lane.rank}`.trim();
  pen.fillText(name, box.left - 8, place.top + Math.max(place.height, 8) / 2, box.left - 10);
}

function scale(pen, box) {
  const t = DATA.timeline;
  const unit = t.span_s / t.ticks;
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "alphabetic";
  const low = view.from * unit;
  const high = view.to * unit;
  for (const at of ticks(low, high, (box.right - box.left) / 90)) {
    const x = box.left + (at - low) / (high - low) * (box.right - box.left);
    pen.fillStyle = colour("line");
    pen.fillRect(x, AXIS - 6, 1, 6);
    pen.fillStyle = colour("soft");
    pen.textAlign = x > box.right - 30 ? "right" : x < box.left + 20 ? "left" : "center";
    pen.fillText(at ? seconds(Number(at.toPrecision(6))) : "0", x, AXIS - 10);
  }
}

function marks(pen, box) {
  const t = DATA.timeline;
  const column = (ticksAt) => box.left + (ticksAt - view.from) / (view.to - view.from) * (box.right - box.left);
  const end = column(t.met_s / t.span_s * t.ticks);
  if (end > box.left && end <= box.right) {
    pen.fillStyle = colour("ink");
    for (let y = AXIS; y < chart.height; y += 7) pen.fillRect(end, y, 1, 4);
  }
  if (chart.selected) {
    const [a, b] = chart.selected.map(column);
    pen.globalAlpha = 0.18;
    pen.fillStyle = colour("accent");
    pen.fillRect(Math.min(a, b), AXIS, Math.abs(b - a), chart.height - AXIS);
    pen.globalAlpha = 1;
  }
}

function hover(event, time) {
  if (chart.selected) return hideTip();
  const y = event.clientY - chart.canvas.getBoundingClientRect().top - AXIS + chart.box.scrollTop;
  const lane = chart.lanes[Math.floor(y / rowHeight())];
  const bar = lane && y >= 0 && barAt(lane, time);
  return bar ? showTip(event, tellBar(lane, bar)) : hideTip();
}

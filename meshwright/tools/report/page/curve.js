// Memory of one rank over a step, stacked by category.

const CURVE = { width: 640, height: 290, left: 58, right: 8, top: 18, bottom: 26 };

function curvePanel(group) {
  const name = DATA.ranks.length === 1 ? "every rank" : `pipeline ${which("rank", group.ranks)}`;
  if (!group.curve.length) {
    return [el("p", { class: "muted", text: DATA.memory.some((g) => g.curve.length)
      ? `No curve is kept for ${name}: it is not among the fullest.`
      : "The plan keeps no detail for memory over time." })];
  }
  return [el("p", { class: "muted", text: `Over time: ${name}` }), fitted((width) => { CURVE.width = width; return curve(group); })];
}

function curve(group) {
  const c = CURVE;
  const top = scaleOf([group], Math.max(...group.curve.map(total(group)))) * 1.04;
  const x = (at) => c.left + at / DATA.timeline.ticks * (c.width - c.left - c.right);
  const y = (n) => c.height - c.bottom - n / top * (c.height - c.top - c.bottom);
  const layers = stack(group);
  const shapes = layers.map(({ name, low, high }) =>
    svg("path", { d: area(group.curve, low, high, x, y), fill: `var(--${name})` }));
  const picture = svg("svg", { viewBox: `0 0 ${c.width} ${c.height}`, role: "img",
    "aria-label": "Memory over time" }, grid(top, x, y), shapes, limitLine(group, x, y));
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * c.width;
    const time = (at - c.left) / (c.width - c.left - c.right) * DATA.timeline.ticks;
    if (time < 0 || time > DATA.timeline.ticks) return hideTip();
    return showTip(event, tellMoment(group, time));
  });
  picture.addEventListener("pointerleave", hideTip);
  return picture;
}

function total(group) {
  const base = stay.reduce((sum, k) => sum + group.peak[k], 0);
  return (point) => base + point[1] + point[2] + point[3] + point[4];
}

// Per category, where its band begins and ends at each point.
function stack(group) {
  const moving = { gradients: 1, activations: 2, communication: 3, workspace: 4 };
  const base = group.curve.map(() => 0);
  return [...stay, ...Object.keys(moving)].map((name) => {
    const low = [...base];
    group.curve.forEach((point, i) => { base[i] += name in moving ? point[moving[name]] : group.peak[name]; });
    return { name, low, high: [...base] };
  }).filter(({ low, high }) => high.some((value, i) => value > low[i]));
}

function area(points, low, high, x, y) {
  const end = DATA.timeline.ticks;
  const up = [];
  const down = [];
  points.forEach((point, i) => {
    const from = i ? point[0] : 0;
    const to = i + 1 < points.length ? points[i + 1][0] : end;
    up.push(`${x(from).toFixed(1)},${y(high[i]).toFixed(1)} ${x(to).toFixed(1)},${y(high[i]).toFixed(1)}`);
    down.unshift(`${x(to).toFixed(1)},${y(low[i]).toFixed(1)} ${x(from).toFixed(1)},${y(low[i]).toFixed(1)}`);
  });
  return `M${up.join(" ")} ${down.join(" ")}Z`;
}

function grid(top, x, y) {
  const c = CURVE;
  const span_s = DATA.timeline.met_s;
  const [, unit] = UNITS_B.find(([, size]) => top >= size) || ["B", 1];
  const across = ticks(0, top / unit, 5).map((n) => n * unit).map((n) => [
    svg("line", { class: "rule", x1: c.left, x2: c.width - c.right, y1: y(n), y2: y(n) }),
    svg("text", { x: c.left - 8, y: y(n) + 4, "text-anchor": "end", text: bytes(n) })]);
  const along = ticks(0, span_s, c.width / 110).map((at) => svg("text", { y: c.height - 6,
    "text-anchor": at ? "middle" : "start", x: Math.min(x(at / span_s * DATA.timeline.ticks), c.width - 18),
    text: at ? seconds(Number(at.toPrecision(6))) : "0" }));
  return [across, along].flat(2);
}

function limitLine(group, x, y) {
  if (!group.room) return [];
  const c = CURVE;
  if (y(group.room) < 0) {
    return [svg("text", { x: c.width - c.right, y: c.top - 5, "text-anchor": "end", style: { fill: "var(--bad)" },
      text: `limit ${bytes(group.room)}, far above` })];
  }
  return [
    svg("line", { x1: c.left, x2: c.width - c.right, y1: y(group.room), y2: y(group.room),
      stroke: "var(--bad)", "stroke-width": 1.5, "stroke-dasharray": "5 4" }),
    svg("text", { x: c.width - c.right, y: y(group.room) - 5, "text-anchor": "end",
      style: { fill: "var(--bad)" }, text: `limit ${bytes(group.room)}` })];
}

function tellMoment(group, time) {
  let at = 0;
  while (at + 1 < group.curve.length && group.curve[at + 1][0] <= time) at += 1;
  const point = group.curve[at];
  const t = DATA.timeline;
  const lines = [`at ${seconds(time / t.ticks * t.met_s)}: ${bytes(total(group)(point))}`];
  ["gradients", "activations", "communication", "workspace"].forEach((k, i) => {
    if (point[i + 1]) lines.push(`${MEMORY_NAMES[k]} ${bytes(point[i + 1])}`);
  });
  return lines.join("\n");
}

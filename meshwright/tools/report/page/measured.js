// What a run took beside the prediction.

function measuredSection() {
  const m = DATA.measured;
  if (!m) return null;
  const rows = m.rows.map((row) => el("tr", {}, el("td", { class: "muted", text: row.group }), el("td", { text: row.what }),
    el("td", { class: "num", text: row.predicted === null ? "" : quantity(row, row.predicted) }),
    el("td", { class: "num", text: quantity(row, row.measured) }),
    el("td", { class: "num", text: errorText(row.error) }),
    el("td", { class: "wide" }, errorBar(row.error))));
  const verdict = el("p", { text: m.verdict, style: { color: `var(--${m.inside ? "good" : "bad"})`, fontWeight: 600 } });
  const node = section("measured", "Predicted and measured", `A run on ${m.machine}: medians of its timed steps, the worst first.`,
    verdict, stepBars(m.steps), el("div", { class: "scroll" }, el("table", {},
      head("", "what", "#predicted", "#measured", "#error", "~"), el("tbody", {}, rows))), kernelCalls(m.kernels), cacheHits(m.caches));
  node.classList.add("long");
  return node;
}

// Rows that caches of tables had, of those that were asked for; nothing where a plan has none.
function cacheHits(caches) {
  if (!caches.length) return null;
  const rows = caches.map((one) => el("tr", {}, el("td", { text: one.table }), el("td", { class: "num", text: whole(one.rank) }),
    el("td", { class: "num", text: whole(one.slots) }), el("td", { class: "num", text: whole(one.rows) }),
    el("td", { class: "num", text: percent(one.hits, 1) }), el("td", { class: "num", text: whole(one.written) })));
  return el("div", { class: "scroll", id: "caches" }, el("h3", { text: "Caches of tables" }),
    el("table", {}, head("table", "#rank", "#slots", "#rows read", "#in a slot", "#written back"), el("tbody", {}, rows)));
}

// Which way calls of fused kernels went, and why not by Triton; nothing where a plan has none.
function kernelCalls(kernels) {
  if (!kernels.length) return null;
  const rows = kernels.map((one) => el("tr", {}, el("td", { text: one.kernel }), el("td", { text: one.way }),
    el("td", { class: "muted", text: one.why }), el("td", { class: "num", text: whole(one.calls) })));
  return el("div", { class: "scroll", id: "kernels" }, el("h3", { text: "Calls of fused kernels" }),
    el("table", {}, head("kernel", "way", "why", "#calls"), el("tbody", {}, rows)));
}

function errorText(error) {
  if (error === null) return "";
  return Math.abs(error) < 5e-4 ? "=" : `${error > 0 ? "+" : "−"}${percent(Math.abs(error), 1)}`;
}

function quantity(row, value) {
  return row.unit === "bytes" ? bytes(value) : seconds(value);
}

// From the middle: to the right where the prediction is too high.
function errorBar(error) {
  if (error === null) return "";
  const size = Math.min(0.5, Math.abs(error) / 2);
  const left = error > 0 ? 50 : 50 - 100 * size;
  return el("div", { class: "bar", style: { background: "var(--track)", position: "relative" } },
    el("i", { style: { position: "absolute", left: `${left}%`, width: `${100 * size}%`,
      background: `var(--${Math.abs(error) > DATA.plan.band ? "bad" : "accent"})` } }));
}

function stepBars(steps) {
  const most = Math.max(...steps.map(([s]) => s), DATA.plan.step_s);
  const tones = { timed: "accent", "warm-up": "wait", tracked: "faint", traced: "faint" };
  const shown = steps.slice(-120);
  return el("div", { style: { display: "flex", alignItems: "flex-end", gap: "1px", height: "54px", margin: "0 0 12px" } },
    shown.map(([s, kind], i) => telling(el("i", { style: { flex: "1 1 0", maxWidth: "14px", height: `${100 * s / most}%`,
      background: `var(--${tones[kind] || "faint"})`, borderRadius: "2px 2px 0 0" } }),
    `step ${steps.length - shown.length + i}, ${kind}: ${seconds(s)}`)));
}

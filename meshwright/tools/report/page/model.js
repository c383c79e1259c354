// The model as it is placed: a strip of all blocks, and the parameters of each kind of block.

const STAGE_HUES = ["forward", "backward", "gradients", "optimizer", "weight", "offload", "recompute", "gather"];
const AXIS_COLOURS = { tp: "axis-tp", cp: "axis-cp", ep: "axis-ep", tp_row: "axis-row", tp_col: "axis-col",
  tp_depth: "axis-depth", dp: "axis-dp" };

function modelSection() {
  const m = DATA.model;
  if (!Object.keys(m.layouts).length) return null;
  const strip = el("div", { class: "strip" });
  const list = el("div");
  const draw = () => {
    strip.replaceChildren(...m.runs.map(stripCell));
    const kinds = blockKinds(filter.stage);
    list.replaceChildren(...kinds.slice(0, 60).map((kind, i) => kindDetails(kind, i === heaviest(kinds))));
    if (kinds.length > 60) list.append(el("button", { text: `show all ${kinds.length} kinds of blocks`,
      onclick: (event) => { event.target.remove(); list.append(...kinds.slice(60).map((k) => kindDetails(k, false))); } }));
  };
  draw();
  onFilter(draw);
  const blocks = m.runs.reduce((sum, run) => sum + run.count, 0);
  const node = section("model", "Model and placements", m.runs.length
    ? `${plural(blocks, "block")} in order, coloured by stage; below, the kinds of blocks with their parameters, `
      + "coloured by the axes that split them (grey: whole on every rank of a replica)."
    : "The kinds of blocks with the parameters that are split.", m.runs.length > 0 && strip, list);
  node.classList.add("long");
  return node;
}

function stripCell(run, i, runs) {
  const share = { flexGrow: `${run.count}`, background: `var(--${STAGE_HUES[run.stage % STAGE_HUES.length]})` };
  const blocks = runs.reduce((sum, r) => sum + r.count, 0);
  const named = run.count / blocks > 0.06;
  const label = DATA.model.stages.length > 1 ? [el("span", { class: "wide", text: "stage\u00a0" }), `${run.stage}`] : [run.pattern];
  const cell = el("button", { style: share, "aria-label": `${run.first} to ${run.last}, stage ${run.stage}`,
    onclick: () => chooseStage(run.stage) }, named ? label : []);
  if (filter.stage >= 0 && filter.stage !== run.stage) cell.classList.add("dim");
  if (i && runs.length < 80 && runs[i - 1].stage !== run.stage) cell.classList.add("edge");
  const lines = [runName(run), `stage ${run.stage}`, run.treatment].filter(Boolean);
  return telling(cell, lines.join("\n"));
}

function runName(run) {
  return run.count === 1 ? run.first : `${run.first} … ${run.last}`;
}

// Runs with one layout and treatment together.
function blockKinds(stage) {
  const groups = new Map();
  const runs = DATA.model.runs.length ? DATA.model.runs
    : Object.keys(DATA.model.layouts).map((layout) => ({ layout, treatment: "", count: 0, stage: -1,
      first: DATA.model.layouts[layout].pattern, last: "" }));
  for (const run of runs) {
    if (stage >= 0 && run.stage >= 0 && run.stage !== stage) continue;
    const key = JSON.stringify([run.layout, run.treatment]);
    if (!groups.has(key)) groups.set(key, { layout: run.layout, treatment: run.treatment, runs: [], count: 0 });
    const group = groups.get(key);
    group.runs.push(run);
    group.count += run.count;
  }
  return [...groups.values()];
}

function kindBytes(kind) {
  const layout = DATA.model.layouts[kind.layout];
  return layout ? layout.parameters.reduce((sum, p) => sum + p.nbytes, 0) * Math.max(1, kind.count) : 0;
}

function heaviest(kinds) {
  return kinds.reduce((best, kind, i) => (kindBytes(kind) > kindBytes(kinds[best]) ? i : best), 0);
}

function kindDetails(kind, open) {
  const layout = DATA.model.layouts[kind.layout] || { pattern: kind.runs[0].first, parameters: [], ops: [] };
  const stages = [...new Set(kind.runs.map((run) => run.stage))].filter((s) => s >= 0);
  const body = el("div");
  const node = el("details", { open, ontoggle: () => { if (node.open && !body.childElementCount) showKind(body, layout); } },
    el("summary", {}, el("span", { class: "grow" }, el("code", { text: kind.count === 1 ? kind.runs[0].first : layout.pattern })),
      kind.count > 1 && el("span", { class: "tag", text: plural(kind.count, "block") }),
      stages.length > 0 && el("span", { class: "tag", text: which("stage", stages) }),
      kind.treatment && el("span", { class: "tag", text: kind.treatment }),
      el("span", { class: "tag", text: bytes(layout.parameters.reduce((sum, p) => sum + p.nbytes, 0)) })),
    paramBar(layout), body);
  if (open) showKind(body, layout);
  return node;
}

function paintOf(param) {
  const axes = Object.keys(param.placed).filter((axis) => param.placed[axis].startsWith("S"));
  if (!axes.length) return "var(--whole)";
  const names = axes.map((axis) => `var(--${AXIS_COLOURS[axis] || "accent"})`);
  return names.length === 1 ? names[0]
    : `repeating-linear-gradient(45deg, ${names.map((n, i) => `${n} ${i * 5}px ${i * 5 + 5}px`).join(", ")})`;
}

// Parameters side by side, as wide as they are large.
function paramBar(layout) {
  const all = layout.parameters.reduce((sum, p) => sum + p.nbytes, 0);
  if (!all) return null;
  const bar = el("div", { class: "bar", style: { height: "12px", margin: "6px 0 2px" } });
  for (const param of layout.parameters) {
    const cell = el("i", { style: { background: paintOf(param), width: `${100 * param.nbytes / all}%`,
      borderRight: param.nbytes > all / 100 ? "1px solid var(--card)" : null } });
    bar.append(telling(cell, `${param.key}\n${bytes(param.nbytes)}\n${placedText(param)}`));
  }
  return bar;
}

function placedText(param) {
  const axes = Object.entries(param.placed);
  return axes.length ? axes.map(([axis, where]) => `${axis} ${where}`).join(", ") : "whole";
}

function showKind(body, layout) {
  const rows = el("tbody");
  let before = "";
  for (const param of layout.parameters) {
    const cut = param.key.lastIndexOf(".");
    const home = param.key.slice(0, Math.max(0, cut));
    if (home && home !== before) rows.append(el("tr", { class: "module" }, el("td", { colspan: 4 }, el("code", { text: home }))));
    before = home;
    rows.append(paramRow(param, home));
  }
  if (rows.childElementCount) {
    body.append(el("div", { class: "scroll" }, el("table", {}, head("parameter", "shape", "#size", "placement"), rows)));
  }
  if (layout.ops.length) body.append(opsDetails(layout));
}

function paramRow(param, home) {
  const split = Object.entries(param.placed).filter(([, where]) => where.startsWith("S"));
  const chips = split.map(([axis, where]) => el("span", { class: "chip", text: `${axis} ${where}`,
    style: { background: `var(--${AXIS_COLOURS[axis] || "accent"})` } }));
  const name = home ? param.key.slice(home.length + 1) : param.key;
  return el("tr", {}, el("td", { style: { paddingLeft: home ? "18px" : "0" } }, el("code", { text: name })),
    el("td", {}, el("code", { text: param.shape.join(" × ") || "scalar" }), " ", el("span", { class: "muted", text: param.dtype })),
    el("td", { class: "num", text: param.nbytes ? bytes(param.nbytes) : "" }),
    telling(el("td", {}, chips.length ? chips : el("span", { class: "chip whole", text: "whole" })), placedText(param)));
}

function opsDetails(layout) {
  const body = el("div", { class: "scroll" });
  const node = el("details", { ontoggle: () => {
    if (!node.open || body.childElementCount) return;
    body.append(el("table", {}, head("op", "axis: inputs -> outputs"), el("tbody", {}, layout.ops.map(([key, placed]) =>
      el("tr", {}, el("td", {}, el("code", { text: key })), el("td", {}, Object.entries(placed).map(([axis, text]) =>
        el("div", {}, el("code", { text: `${axis}: ${text}` })))))))));
  } }, el("summary", {}, el("span", { class: "muted", text: `strategies of ${plural(layout.ops.length, "op")}` })), body);
  return node;
}

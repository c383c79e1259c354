// How the plan was found: the best step so far, the bound, and what lost.

function searchSection() {
  const s = DATA.search;
  if (!s) return null;
  const seen = s.exhausted ? "its whole space" : "part of its space";
  const words = `${s.searcher} (seed ${s.seed}) judged ${plural(s.candidates, "candidate")}, ${whole(s.infeasible)} of them `
    + `infeasible, ${seen}. `
    + (s.bound_s ? `By the bound, ${s.bounded} is faster than ${seconds(s.bound_s)}; this one takes `
      + `${seconds(DATA.plan.step_s)}, ${percent(s.gap, 1)} more.` : "No bound is known.");
  const pruned = Object.entries(s.pruned).map(([why, n]) => `${whole(n)} by ${why}`).join(", ");
  return section("search", "Search", words, pruned && el("p", { class: "why", text: `Ruled out without judging: ${pruned}.` }),
    s.improved.length > 1 && fitted((width) => progressChart(s, width)), s.others.length > 0 && othersTable(s));
}

function progressChart(s, width) {
  const c = { width, height: 210, left: 62, right: width < 600 ? 96 : 120, top: 16, bottom: 26 };
  const last = s.candidates;
  const steps = s.improved.map((p) => p.step_s);
  const high = Math.max(...steps);
  const low = Math.min(s.bound_s || Infinity, ...steps);
  const x = (n) => c.left + Math.log1p(n) / Math.log1p(last) * (c.width - c.left - c.right);
  const pad = (high - low) * 0.08 || high * 0.05;
  const y = (v) => c.top + (high + pad - v) / (high - low + 2 * pad) * (c.height - c.top - c.bottom);
  let path = `M${x(s.improved[0].at)},${y(steps[0])}`;
  s.improved.slice(1).forEach((p) => { path += `H${x(p.at)}V${y(p.step_s)}`; });
  path += `H${x(last)}`;
  const dots = s.improved.map((p) => telling(svg("circle", { cx: x(p.at), cy: y(p.step_s), r: 4, fill: "var(--accent)" }),
    `${p.name}\n${seconds(p.step_s)}, candidate ${whole(p.at)}`));
  const rules = ticks(low - pad, high + pad, 4).map((v) => [
    svg("line", { class: "rule", x1: c.left, x2: c.width - c.right, y1: y(v), y2: y(v) }),
    svg("text", { x: c.left - 8, y: y(v) + 4, "text-anchor": "end", text: seconds(Number(v.toPrecision(6))) })]);
  const bound = s.bound_s ? [svg("line", { x1: c.left, x2: c.width - c.right, y1: y(s.bound_s), y2: y(s.bound_s),
    stroke: "var(--good)", "stroke-width": 1.5, "stroke-dasharray": "5 4" }),
  svg("text", { x: c.width - c.right + 8, y: y(s.bound_s) + 4, style: { fill: "var(--good)" }, text: `bound ${seconds(s.bound_s)}` })] : [];
  return svg("svg", { viewBox: `0 0 ${c.width} ${c.height}`, role: "img",
    "aria-label": "Best step time over candidates judged" }, rules.flat(), bound,
  svg("path", { d: path, fill: "none", stroke: "var(--accent)", "stroke-width": 2 }), dots,
  svg("text", { x: c.width - c.right + 8, y: y(steps[steps.length - 1]) + 4, text: `best ${seconds(steps[steps.length - 1])}` }),
  svg("text", { x: c.width - c.right, y: c.height - 4, "text-anchor": "end", text: `${whole(last)} candidates judged (log scale)` }));
}

function othersTable(s) {
  const best = DATA.plan.step_s;
  const slowest = Math.max(best, ...s.others.map((o) => o.step_s));
  const row = (name, step, peak, why, tone) => el("tr", {}, el("td", { text: name }),
    el("td", { class: "num", text: step ? seconds(step) : "-" }),
    el("td", { class: "wide" }, el("div", { class: "bar" }, el("i", { style: { width: `${100 * step / slowest}%`, background: `var(--${tone})` } }))),
    el("td", { class: "num", text: peak ? bytes(peak) : "" }), el("td", { text: why }));
  return el("div", { class: "scroll" }, el("table", { class: "others" }, head("best of its kind", "#step", "~", "#peak", "why not"),
    el("tbody", {}, row("this plan", best, DATA.memory[0].used, "", "accent"),
      s.others.map((o) => row(o.name, o.step_s, o.peak, o.why, o.why.startsWith("does not fit") ? "bad" : "faint")))));
}

// What is sent over which links, for what: per rank and step.

const PURPOSES = { tensors: "tensors inside blocks", gradients: "gradients", parameters: "parameters",
  stages: "between stages" };
const PURPOSE_COLOURS = { tensors: "tensor", gradients: "gradients", parameters: "gather", stages: "accent" };

function trafficSection() {
  if (!DATA.traffic.length) return null;
  const body = el("div");
  const draw = () => body.replaceChildren(trafficTable(filter.stage), messageTable(filter.stage));
  draw();
  onFilter(draw);
  return section("traffic", "Communication", "Bytes that one rank of the busiest stage sends in a step, and what "
    + "the collectives and messages take; part of it hides behind computing.", body);
}

function ofStage(row, stage) {
  const found = Object.entries(row.stages).filter(([s]) => stage < 0 || Number(s) === stage);
  return {
    nbytes: Math.max(0, ...found.map(([, [n]]) => n)),
    seconds: Math.max(0, ...found.map(([, [, s]]) => s)),
    where: found.length,
  };
}

function trafficTable(stage) {
  const rows = DATA.traffic.map((row) => ({ ...row, ...ofStage(row, stage) })).filter((row) => row.nbytes);
  if (!rows.length) return el("p", { class: "muted", text: "This stage sends nothing." });
  const most = Math.max(...rows.map((row) => row.seconds));
  const tiers = [...new Set(rows.map((row) => row.link))];
  tiers.sort((a, b) => rate(rows, b) - rate(rows, a));
  const body = el("tbody");
  for (const tier of tiers) {
    body.append(el("tr", {}, el("td", { class: "tier", colspan: 6,
      text: `${tier}${rate(rows, tier) ? `, ${bytes(rate(rows, tier))}/s per device` : ""}` })));
    for (const row of rows.filter((r) => r.link === tier)) body.append(trafficRow(row, most));
  }
  return el("div", { class: "scroll" }, el("table", {},
    head("axis", "for", "#per rank", "~#all ranks", "#of a step", "~"), body));
}

// What replicas send each other, message by message, and what of it nothing hides.
function messageTable(stage) {
  const rows = DATA.messages.filter((row) => stage < 0 || row.stages.includes(stage));
  if (!rows.length) return el("div");
  const body = el("tbody");
  for (const row of rows) {
    body.append(el("tr", {}, el("td", { text: row.form }), el("td", { text: row.what }),
      el("td", { class: "wide", text: row.primitive.replaceAll("_", "-") }), el("td", {}, el("code", { text: row.axis })),
      el("td", { text: row.when }), el("td", { class: "num", text: bytes(row.nbytes) }),
      el("td", { class: "num", text: seconds(row.seconds) }),
      el("td", { class: "num", text: row.exposed_s ? seconds(row.exposed_s) : "hidden" })));
  }
  return el("div", { class: "scroll" }, el("h3", { text: "Among replicas" }), el("table", {},
    head("form", "what", "~how", "axis", "when", "#per rank", "#takes", "#exposed"), body));
}

function rate(rows, tier) {
  return rows.find((row) => row.link === tier).rate;
}

function trafficRow(row, most) {
  const share = row.seconds / DATA.plan.step_s;
  const bar = el("div", { class: "bar" }, el("i", { style: { width: `${100 * row.seconds / most}%`,
    background: `var(--${PURPOSE_COLOURS[row.purpose]})` } }));
  return el("tr", {}, el("td", {}, el("code", { text: row.axis })), el("td", { text: PURPOSES[row.purpose] || row.purpose }),
    el("td", { class: "num", text: bytes(row.nbytes) }), el("td", { class: "num wide", text: bytes(row.total) }),
    el("td", { class: "num", text: `${seconds(row.seconds)}, ${percent(share, 1)}` }), el("td", { class: "wide" }, bar));
}

// Another plan beside this one, and measurements that look disturbed.

function besideSection() {
  const b = DATA.beside;
  if (!b) return null;
  const text = (row, value) => value === null ? "" : row.unit === "bytes" ? bytes(value)
    : row.unit === "s" ? seconds(value) : digits(value);
  const shown = b.figures.filter((row) => row.first !== row.second);
  const rows = shown.map((row) => el("tr", {}, el("td", { class: "muted wide", text: row.section }), el("td", { text: row.what }),
    el("td", { class: "num", text: text(row, row.first) }), el("td", { class: "num", text: text(row, row.second) }),
    el("td", { class: "num", text: changeText(row.change) })));
  const same = b.figures.length - shown.length;
  return section("beside", "Beside another plan",
    `${b.same_model ? "" : `Of another model (${b.model}). `}The other one is ${b.name}. Seconds are of the rank that waits least, `
    + `memory is of the fullest rank${same ? `; ${plural(same, "figure")} that ${same === 1 ? "is" : "are"} equal left out` : ""}.`,
    el("div", { class: "scroll" }, el("table", {}, head("~", "what", "#this plan", "#the other", "#change"), el("tbody", {}, rows))));
}

const ODD = 12;

// Of what grew to a multiple, the multiple.
function changeText(change) {
  return change !== null && change > 2 ? `× ${digits(1 + change)}` : errorText(change);
}

function outlierSection() {
  const all = DATA.outliers;
  if (!all) return null;
  const words = all.length ? "They are used as they are. A machine that did other work meanwhile leaves such figures; measuring "
    + "them again may change the prediction." : "None of the profile's measurements looks disturbed.";
  const rows = all.slice(0, ODD).map((one) => el("tr", {},
    el("td", {}, el("div", { text: one.what }), el("div", { class: "muted", text: one.why })),
    el("td", { class: "num", text: `${seconds(one.time.median_s)} ± ${percent(one.time.spread)}` })));
  const more = all.length > ODD && el("p", { class: "why", text: `and ${whole(all.length - ODD)} more` });
  return section("outliers", "Measurements that look disturbed", words, all.length && el("div", { class: "scroll" },
    el("table", {}, head("what", "#median"), el("tbody", {}, rows))), more);
}

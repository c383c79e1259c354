// Puts the page together.

const SHORT = { time: "time", timeline: "timeline", measured: "measured", beside: "other plan", outliers: "disturbed", memory: "memory", traffic: "communication",
  model: "placements", search: "search", notes: "to know" };

function chooseStage(stage) {
  setStage(filter.stage === stage ? -1 : stage);
  const list = document.getElementById("stage-filter");
  if (list) list.value = `${filter.stage}`;
}

function stageFilter() {
  const count = DATA.timeline.stages;
  if (count < 2) return null;
  const names = DATA.model.stages;
  const options = [el("option", { value: -1, text: "all" })];
  for (let i = 0; i < count; i += 1) {
    options.push(el("option", { value: i, text: `${i}: ${names[i].first} … ${names[i].last}`.slice(0, 70) }));
  }
  return el("label", {}, "stage ", el("select", { id: "stage-filter", onchange: (event) => setStage(Number(event.target.value)) }, options));
}

function notesSection() {
  const all = [...DATA.warnings.map((text) => ["note warning", text]), ...DATA.notes.map((text) => ["note", text])];
  return all.length ? section("notes", "To know", "", all.map(([name, text]) => el("p", { class: name, text }))) : null;
}

function foot() {
  const p = DATA.plan;
  const versions = Object.entries(p.versions).map(([name, v]) => `${name} ${v}`).join(", ");
  return el("footer", { text: [`plan ${p.hash.slice(0, 12)}`, p.profile && `profile: ${p.profile}`, versions,
    "made by meshwright"].filter(Boolean).join(" · ") });
}

function build() {
  look(0, span());
  const parts = [whereTimeGoes(), timelineSection(), besideSection(), measuredSection(), memorySection(), trafficSection(), modelSection(),
    searchSection(), outlierSection(), notesSection()].filter(Boolean);
  const links = parts.map((part) => el("a", { href: `#${part.id}`, text: SHORT[part.id] }));
  document.getElementById("page").append(...headline(), figures(), el("nav", {}, links, stageFilter()), ...parts, foot());
  document.body.append(tip);
  arrange();
  document.body.dataset.ready = "yes";
}

// On paper: light, all rows, sharp.
function forPaper(printing) {
  chart.printing = printing;
  if (printing) document.documentElement.dataset.theme = "light";
  else delete document.documentElement.dataset.theme;
  arrange();
}

build();
addEventListener("beforeprint", () => forPaper(true));
addEventListener("afterprint", () => forPaper(false));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);

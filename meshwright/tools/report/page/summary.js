// The top of the page: what the plan is, and where the step of each pipeline rank goes.

function amount(parameters) {
  const [unit, scale] = parameters >= 1e9 ? ["B", 1e9] : ["M", 1e6];
  return `${digits(parameters / scale)}${unit} parameters`;
}

function headline() {
  const p = DATA.plan;
  const facts = [
    amount(p.parameters), `${p.cluster}: ${p.used} of ${plural(p.devices, "device")}`,
    `batch ${whole(p.batch)} = ${p.microbatches} × ${digits(p.batch / p.microbatches)}`,
    `${p.precision}, ${p.optimizer}`, p.style && `priced as ${p.style} runs it`, p.schedule && `schedule ${p.schedule}`,
    p.objective !== "throughput" && `objective ${p.objective}`,
    p.constraints.length && `constraints ${p.constraints.join(", ")}`,
  ];
  return [el("h1", { text: p.model }), el("p", { class: "lead", text: facts.filter(Boolean).join(" · ") })];
}

function figure(value, text, more) {
  const together = (said) => said && said.replace(/(\d) (\S+)$/, "$1\u00a0$2");
  return el("div", { class: "figure" }, el("b", { text: value }), el("span", { text }),
    more && el("span", { text: together(more) }));
}

function figures() {
  const p = DATA.plan;
  const fullest = DATA.memory[0];
  const found = [
    figure(seconds(p.step_s), "per step", `± ${percent(p.band)}, ${p.source}`),
    figure(digits(p.samples_per_s), "samples per second"),
    p.tokens > 1 && figure(digits(p.samples_per_s * p.tokens / p.used), "tokens per second and device"),
    p.mfu !== null && figure(percent(p.mfu, 1), "of the devices' peak (MFU)", "work of the model as written"),
    figure(bytes(fullest.used), fullest.room ? `of ${bytes(fullest.room)} on the fullest rank`
      : "on the fullest rank", fullest.room && `${percent(fullest.used / fullest.room)} used`),
  ];
  if (DATA.ranks.length > 1) found.push(figure(percent(DATA.timeline.bubble, 1), "of the pipeline is idle"));
  if (DATA.search && DATA.search.bound_s) {
    const s = DATA.search;
    found.push(figure(percent(s.gap, 1), "above the bound", `${s.bounded} takes less than ${seconds(s.bound_s)}`));
  }
  return el("div", { class: "figures" }, found.filter(Boolean));
}

// Ranks whose seconds are equal to within 0.2 % of the step are one row.
function timeGroups() {
  const step = DATA.plan.step_s;
  const groups = new Map();
  DATA.ranks.forEach((rank, index) => {
    const key = Object.keys(SECONDS_OF).map((k) => Math.round((rank.seconds[k] || 0) / step * 500)).join() + late(rank);
    if (!groups.has(key)) groups.set(key, { rank, members: [] });
    groups.get(key).members.push(index);
  });
  return [...groups.values()];
}

// Forms of synchronisation that hide messages under the next step's forward.
function late(rank) {
  return rank.late.map(([form, s]) => `, ${form}: hides ${s ? seconds(s) : "none"} of its gathers under the next forward`)
    .join("");
}

function whereTimeGoes() {
  const step = DATA.plan.step_s;
  const groups = timeGroups();
  const used = Object.keys(SECONDS_OF).filter((k) => DATA.ranks.some((r) => r.seconds[k] > step * 5e-4));
  const body = el("div", { class: "rows" });
  const first = groups.length > 14 ? 10 : groups.length;
  const draw = (count) => body.replaceChildren(...groups.slice(0, count).flatMap((group) => timeRow(group, used)));
  draw(first);
  const many = el("button", { text: `show all ${groups.length} kinds of ranks`,
    onclick: () => { draw(groups.length); many.remove(); } });
  return section("time", "Where the step goes",
    "Seconds of each pipeline rank, as the simulator counts them; equal ranks are one row.",
    body, legend(used.map((k) => [k, SECONDS_OF[k]])), first < groups.length && many);
}

function timeRow(group, used) {
  const step = DATA.plan.step_s;
  const { rank, members } = group;
  const bar = stacked(used.map((k) => {
    const share = (rank.seconds[k] || 0) / step;
    return [k, share, `${SECONDS_OF[k]}: ${seconds(share * step)}, ${percent(share, 1)}`,
      share > 0.09 ? percent(share) : ""];
  }), 1);
  bar.classList.add("named");
  const devices = members.length === 1 ? `devices ${rank.devices}` : `${members.length} × ${plural(rank.count, "device")}`;
  const names = pipelineRanks(members);
  return [el("div", { class: "who" }, el("b", { text: names }), el("span", { class: "muted", text: ` ${devices}, ${rank.mesh}${late(rank)}` })), bar];
}

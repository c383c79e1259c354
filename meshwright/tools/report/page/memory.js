// Peaks of memory: groups of equal ranks against the limit of their devices.

const KEPT = ["parameters", "optimizer", "gradients", "activations", "communication", "workspace",
  "inputs", "fragmentation"];
const stay = ["parameters", "optimizer", "inputs", "fragmentation"];
const MEMORY_NAMES = { parameters: "parameters", optimizer: "optimizer state", gradients: "gradients",
  activations: "activations", communication: "communication buffers", workspace: "workspace",
  inputs: "batch", fragmentation: "fragmentation" };

function memorySection() {
  const most = scaleOf(DATA.memory, 0);
  const list = el("div");
  const panel = el("div", { id: "memory-curve" });
  let chosen = DATA.memory[0];
  let count = DATA.memory.length > 12 ? 10 : DATA.memory.length;
  const draw = () => {
    const fitting = DATA.memory.filter((group) => holds(group, filter.stage));
    if (!fitting.includes(chosen)) chosen = fitting[0];
    list.replaceChildren(...fitting.slice(0, count).map((group) => pick(group, most, group === chosen,
      () => { chosen = group; draw(); })));
    if (fitting.length > count) {
      list.append(el("button", { text: `show all ${fitting.length} kinds of ranks`,
        onclick: () => { count = fitting.length; draw(); } }));
    }
    panel.replaceChildren(...curvePanel(chosen));
  };
  draw();
  onFilter(draw);
  const used = KEPT.filter((k) => DATA.memory.some((g) => g.peak[k] > most / 500));
  return section("memory", "Memory", "Peak of each pipeline rank against what its device may use (red); "
    + "ranks that hold the same are one row. The curve is the most held within each action.",
    el("div", { class: "split" }, list, panel), legend(used.map((k) => [k, MEMORY_NAMES[k]])));
}

// What fills a picture: the limit, unless it is so far above that nothing else would be seen.
function scaleOf(groups, least) {
  const used = Math.max(least, ...groups.map((g) => g.used));
  const room = Math.max(0, ...groups.map((g) => g.room || 0));
  return room > 4 * used ? used * 1.15 : Math.max(used, room);
}

function holds(group, stage) {
  return stage < 0 || group.ranks.some((rank) => DATA.ranks[rank].stages.includes(stage));
}

function pick(group, most, pressed, onclick) {
  const parts = KEPT.map((k) => [k, group.peak[k], `${MEMORY_NAMES[k]}: ${bytes(group.peak[k])}`]);
  const bar = stacked(parts, most * 1.02);
  if (group.room && group.room <= most * 1.02) bar.append(el("span", { class: "limit", style: { left: `${100 * group.room / most / 1.02}%` } }));
  const one = group.ranks.length === 1 ? DATA.ranks[group.ranks[0]] : null;
  const name = pipelineRanks(group.ranks) + (one ? ` · devices ${one.devices}` : "");
  const used = bytes(group.used) + (group.room ? `, ${percent(group.used / group.room)}` : "");
  const there = group.host ? `; ${bytes(group.host)} on the host` : "";
  return el("button", { class: "pick", "aria-pressed": `${pressed}`, onclick },
    el("span", { class: "name", text: name }), el("span", { class: "num", text: used + there }), bar);
}

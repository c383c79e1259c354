// The timeline as a Chrome trace: kept as a file, or handed to Perfetto in a window of its own.

const PERFETTO = "https://ui.perfetto.dev";

// One process per row of the timeline, times in microseconds.
function traceEvents() {
  const t = DATA.timeline;
  const scale = t.span_s / t.ticks * 1e6;
  return lanes(-1, "all").flatMap((lane, pid) => {
    const events = [{ ph: "M", pid, tid: 0, name: "process_name", args: { name: laneWords(lane) } },
      { ph: "M", pid, tid: 0, name: "process_sort_index", args: { sort_index: pid } }];
    for (let i = 0; i < lane.bars.length; i += 5) {
      const [kind, stage, microbatch, start, end] = lane.bars.slice(i, i + 5);
      const share = collectiveShare(lane, kind, stage);
      const args = { ...(stage < 0 ? {} : { stage, microbatch }),
        ...(share ? { collectives_in_blocks_ms: share * (end - start) * scale / 1e3 } : {}) };
      events.push({ ph: "X", pid, tid: 0, name: stage < 0 ? WORK_NAMES[kind] : `${stage}${"FBIW"[kind]}${microbatch}`,
        cat: WORK_NAMES[kind], ts: start * scale, dur: (end - start) * scale, args });
    }
    return events;
  });
}

function traceText() {
  return JSON.stringify({ traceEvents: traceEvents(), displayTimeUnit: "ms", otherData: { plan: DATA.plan.hash } });
}

function saveTrace() {
  const address = URL.createObjectURL(new Blob([traceText()], { type: "application/json" }));
  const link = el("a", { href: address, download: `trace-${DATA.plan.hash.slice(0, 12)}.json` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

// Perfetto says PONG to a PING once it listens; then it gets the trace. Nothing goes to a server.
function openInPerfetto() {
  const opened = window.open(PERFETTO);
  if (!opened) return;
  const ping = setInterval(() => opened.closed ? stop() : opened.postMessage("PING", PERFETTO), 100);
  function stop() {
    clearInterval(ping);
    removeEventListener("message", heard);
  }
  function heard(event) {
    if (event.source !== opened || event.origin !== PERFETTO || event.data !== "PONG") return;
    stop();
    const buffer = new TextEncoder().encode(traceText()).buffer;
    opened.postMessage({ perfetto: { buffer, title: `${DATA.plan.model}, plan ${DATA.plan.hash.slice(0, 12)}` } }, PERFETTO);
  }
  addEventListener("message", heard);
}

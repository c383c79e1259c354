// What part of the timeline is seen: zooming, moving, and the keys and gestures for it.

const view = { from: 0, to: 1, listeners: [] };

function span() {
  return DATA.timeline.ticks;
}

function look(from, to) {
  const least = span() / 1e5;
  const width = Math.max(least, Math.min(span(), to - from));
  view.from = Math.max(0, Math.min(span() - width, from));
  view.to = view.from + width;
  for (const listener of view.listeners) listener();
}

function zoom(factor, at = (view.from + view.to) / 2) {
  look(at - (at - view.from) / factor, at + (view.to - at) / factor);
}

function lookAtAll() {
  look(0, span());
}

// `place(event)` gives the time under the pointer; `mark(a, b)` shows what is being selected.
function gestures(canvas, place, mark) {
  let begun = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.pointerType === "touch") return;
    begun = place(event);
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (begun !== null) mark(begun, place(event));
  });
  canvas.addEventListener("pointerup", (event) => {
    if (begun === null) return;
    const end = place(event);
    const [a, b] = [Math.min(begun, end), Math.max(begun, end)];
    begun = null;
    mark(null);
    if (b - a > (view.to - view.from) / 200) look(a, b);
  });
  canvas.addEventListener("dblclick", lookAtAll);
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 300), place(event));
  }, { passive: false });
  pinches(canvas, place);
  canvas.addEventListener("keydown", (event) => keys(event));
}

function keys(event) {
  const move = (view.to - view.from) / 5;
  const known = {
    "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), 0: lookAtAll,
    ArrowLeft: () => look(view.from - move, view.to - move),
    ArrowRight: () => look(view.from + move, view.to + move),
  };
  if (known[event.key]) {
    event.preventDefault();
    known[event.key]();
  }
}

function pinches(canvas, place) {
  let before = null;
  const apart = (touches) => Math.abs(touches[0].clientX - touches[1].clientX);
  canvas.addEventListener("touchmove", (event) => {
    if (event.touches.length !== 2) return;
    event.preventDefault();
    const now = Math.max(8, apart(event.touches));
    if (before) zoom(now / before, place(event.touches[0]));
    before = now;
  }, { passive: false });
  canvas.addEventListener("touchend", () => { before = null; });
}

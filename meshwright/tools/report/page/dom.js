// Making elements. Text only ever goes in as text, so that names cannot become markup.
"use strict";

const DATA = JSON.parse(document.getElementById("plan-data").textContent);
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "style") Object.assign(node.style, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

const tip = el("div", { class: "tip", role: "status" });

function showTip(event, text) {
  tip.textContent = text;
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  const x = Math.min(event.clientX + 14, innerWidth - box.width - 8);
  const y = event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12
    : event.clientY + 18;
  tip.style.left = `${Math.max(8, x)}px`;
  tip.style.top = `${Math.max(8, y)}px`;
}

function hideTip() {
  tip.style.display = "none";
}

// An element that tells more when the pointer is over it.
function telling(node, text) {
  node.addEventListener("pointermove", (event) => showTip(event, text));
  node.addEventListener("pointerleave", hideTip);
  return node;
}

function section(id, title, why, ...children) {
  return el("section", { id }, el("h2", { text: title }), why && el("p", { class: "why", text: why }),
    ...children);
}

function legend(entries) {
  return el("div", { class: "legend" }, entries.map(([name, text]) =>
    el("span", {}, el("i", { style: { background: `var(--${name})` } }), text)));
}

// A bar of parts: [colour name, size, text, what stands in it]; `whole` is what fills it.
function stacked(parts, whole) {
  return el("div", { class: "bar" }, parts.filter((part) => part[1] > 0).map(([name, size, text, shown]) =>
    telling(el("i", { text: shown || null, style: { background: `var(--${name})`, width: `${100 * size / whole}%`,
      color: name === "wait" ? "var(--soft)" : null } }), text)));
}

// What is drawn anew for the width that it has.
function fitted(draw) {
  const node = el("div");
  let before = 0;
  new ResizeObserver(() => {
    const width = Math.round(node.clientWidth);
    if (width && width !== before) node.replaceChildren(draw(before = width));
  }).observe(node);
  return node;
}

// Columns: # before numbers, ~ before what narrow screens leave out.
function head(...names) {
  return el("thead", {}, el("tr", {}, names.map((name) => {
    const kinds = [name.includes("#") && "num", name.includes("~") && "wide"].filter(Boolean);
    return el("th", { text: name.replace(/[#~]/g, ""), class: kinds.join(" ") || null });
  })));
}

// What every part of the page heeds: the stage that it is filtered by, -1 for all.
const filter = { stage: -1, heard: [] };

function onFilter(listener) {
  filter.heard.push(listener);
}

function setStage(stage) {
  filter.stage = stage;
  for (const listener of filter.heard) listener(stage);
}

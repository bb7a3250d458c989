"use strict";
// What all scripts of the page use: elements, numbers, looks of lines, axes. No library, no request.
const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const hidden = new Set();
const charts = [];
const view = { singles: false };

const el = (name, attributes = {}, ...children) => {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
};
const svg = (name, attributes, text) => {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
};
// A button that is on or off.
const toggle = (name, on, kind, act) => {
  const button = el("button", { class: kind, type: "button", "aria-pressed": String(on) }, name);
  button.onclick = () => button.setAttribute("aria-pressed", String(act()));
  return button;
};
const number = (v) => {
  const size = Math.abs(v);
  if (size >= 1000) return v.toLocaleString("en", { maximumFractionDigits: 0 });
  return String(+v.toPrecision(size >= 100 ? 4 : 3));
};
const percent = (v) => `${(100 * v).toFixed(1)}%`;
const bytes = (v) => (v === 0 ? "0" : v >= 1e9 ? `${number(v / 1e9)} GB` : v >= 1e6 ? `${number(v / 1e6)} MB` : `${number(v / 1e3)} kB`);
const secondsText = (v) => `${number(v)} s`;
const three = (v) => v.toPrecision(3);

// ---------------------------------------------------------------- how lines look
const colourOf = (look) => `var(--c${look.colour})`;
const MARKS = {
  circle: "M3,0A3,3 0 1 1 -3,0A3,3 0 1 1 3,0Z",
  square: "M-2.7,-2.7H2.7V2.7H-2.7Z",
  triangle: "M0,-3.6L3.4,2.7H-3.4Z",
  diamond: "M0,-3.9L3.9,0L0,3.9L-3.9,0Z",
  cross: "M-3.4,-1.2H-1.2V-3.4H1.2V-1.2H3.4V1.2H1.2V3.4H-1.2V1.2H-3.4Z",
};
const mark = (look, x, y) => svg("path", { class: "mark", d: MARKS[look.mark], transform: `translate(${x},${y})`, style: `fill:${colourOf(look)}` });
// The line as a chart draws it, for tables, legends and the list of runs.
function swatch(look) {
  const drawn = svg("svg", { class: "swatch", viewBox: "0 0 30 10", width: 30, height: 10, "aria-hidden": "true" });
  drawn.append(svg("line", { x1: 0, x2: 24, y1: 5, y2: 5, style: `stroke:${colourOf(look)}`, "stroke-width": 2.2, "stroke-dasharray": look.dash || "none" }), mark(look, 25, 5));
  return drawn;
}

// ---------------------------------------------------------------- axes
// Ticks at round numbers; at whole ones where there is nothing between them, as between rounds.
function linearTicks(low, high, count, whole) {
  const span = high - low || 1;
  const rough = whole ? Math.max(span / count, 1) : span / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-9; t += step) ticks.push(Math.abs(t) < step * 1e-9 ? 0 : t);
  return ticks;
}
function logTicks(low, high, count) {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  for (const steps of [[1, 2, 5], [1, 3], [1]]) {
    const ticks = [];
    for (let p = from; p <= to; p++) for (const m of steps) {
      const t = m * 10 ** p;
      if (t >= low * 0.999 && t <= high * 1.001) ticks.push(t);
    }
    if (ticks.length <= count || steps.length === 1) return ticks.length > 1 ? ticks : [low, high];
  }
}
function scale(low, high, from, to, log) {
  const f = log ? Math.log : (v) => v;
  const a = f(low), b = f(high) === a ? a + 1 : f(high);
  return (v) => from + ((f(v) - a) / (b - a)) * (to - from);
}
// Not Math.min(...values): hundreds of long runs have more points than a call may have arguments.
const extent = (values) => values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
const quantile = (values, q) => [...values].sort((a, b) => a - b)[Math.floor(q * (values.length - 1))];

// Next to the pointer, inside its figure.
function place(tip, box, event) {
  tip.hidden = false;
  const frame = box.getBoundingClientRect();
  const x = event.clientX - frame.left, y = event.clientY - frame.top;
  const leftSide = x > frame.width / 2;
  tip.style.left = `${Math.max(0, leftSide ? x - tip.offsetWidth - 14 : Math.min(x + 14, frame.width - tip.offsetWidth))}px`;
  tip.style.top = `${Math.max(0, y - tip.offsetHeight - 8)}px`;
}

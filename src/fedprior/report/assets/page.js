"use strict";
// Charts for one page, drawn from the records in #data. No library, no request.
const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const hidden = new Set();
const charts = [];
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];

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
const colour = (i) => `var(--c${i % 8})`;
const number = (v) => {
  const size = Math.abs(v);
  if (size >= 1000) return v.toLocaleString("en", { maximumFractionDigits: 0 });
  return String(+v.toPrecision(size >= 100 ? 4 : 3));
};
const percent = (v) => `${(100 * v).toFixed(1)}%`;
const bytes = (v) => (v === 0 ? "0" : v >= 1e9 ? `${number(v / 1e9)} GB` : v >= 1e6 ? `${number(v / 1e6)} MB` : `${number(v / 1e3)} kB`);
const secondsText = (v) => `${number(v)} s`;

// ---------------------------------------------------------------- axes
function linearTicks(low, high, count) {
  const span = high - low || 1;
  const rough = span / count, power = 10 ** Math.floor(Math.log10(rough));
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

// ---------------------------------------------------------------- a chart of lines
class LineChart {
  // spec: title, series() -> [{name, colour, dash, group, x, y}], x/y: {label, format, log, zero, skip}
  constructor(place, spec) {
    this.spec = spec;
    this.state = { logX: false, logY: false, whole: false };
    this.box = el("figure", { "data-chart": spec.title });
    const tools = el("span", { class: "tools" }, ...(spec.tools || []));
    if (spec.x.log) tools.append(this.toggle("log x", "logX"));
    if (spec.y.log) tools.append(this.toggle("log y", "logY"));
    if (spec.y.skip) tools.append(this.toggle("all values", "whole"));
    const header = el("header", {}, el("h3", {}, spec.title), tools);
    this.plot = el("div");
    this.legend = el("div", { class: "legend" });
    this.tip = el("div", { class: "tip", hidden: "" });
    this.box.append(header, this.plot, this.legend, this.tip);
    place.append(this.box);
    charts.push(this);
  }
  toggle(name, key) {
    const button = el("button", { class: "tool", type: "button", "aria-pressed": "false" }, name);
    button.onclick = () => {
      this.state[key] = !this.state[key];
      button.setAttribute("aria-pressed", this.state[key]);
      this.draw();
    };
    return button;
  }
  visible() {
    const keep = (v) => v !== null && Number.isFinite(v);
    return this.spec.series().filter((s) => !hidden.has(s.group)).map((s) => {
      const points = s.x.map((x, i) => [x, s.y[i]]).filter(([x, y]) => keep(x) && keep(y)
        && (!this.state.logX || x > 0) && (!this.state.logY || y > 0));
      return { ...s, points };
    }).filter((s) => s.points.length);
  }
  range(series) {
    const xs = series.flatMap((s) => s.points.map((p) => p[0])), ys = series.flatMap((s) => s.points.map((p) => p[1]));
    let [x0, x1] = extent(xs), [y0, y1] = extent(ys);
    if (!this.state.logX) x0 = 0;
    if (this.spec.y.zero && !this.state.logY) y0 = Math.min(0, y0);
    // The steep first rounds would squeeze all that follows into one line.
    if (this.spec.y.skip && !this.state.whole) y0 = Math.max(y0, Math.min(quantile(ys, 0.2), y1 - 0.02));
    if (y1 === y0) y1 = y0 + (Math.abs(y0) || 1) * 0.1;
    if (!this.state.logY) {
      const pad = 0.05 * (y1 - y0);
      y1 = this.spec.y.most === undefined ? y1 + pad : Math.min(y1 + pad, this.spec.y.most);
      if (!this.spec.y.zero) y0 = Math.max(y0 - pad, 0);
    }
    return [x0, x1, y0, y1];
  }
  draw() {
    const width = Math.max(this.box.clientWidth, 240), height = 250;
    const series = this.visible();
    this.tip.hidden = true;
    this.plot.replaceChildren();
    this.legend.replaceChildren();
    if (!series.length) {
      this.plot.append(el("div", { class: "empty" }, this.spec.empty || "Nothing to show for the chosen runs."));
      return;
    }
    const [x0, x1, y0, y1] = this.range(series);
    const left = 50, right = 12, top = 8, bottom = 38;
    const X = scale(x0, x1, left, width - right, this.state.logX), Y = scale(y0, y1, height - bottom, top, this.state.logY);
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": this.spec.title });
    const id = `clip${charts.indexOf(this)}`;
    const clip = svg("clipPath", { id });
    clip.append(svg("rect", { x: left, y: top - 3, width: width - left - right + 4, height: height - top - bottom + 6 }));
    root.append(clip);
    const yTicks = this.state.logY ? logTicks(y0, y1, 6) : linearTicks(y0, y1, 5);
    for (const t of yTicks) {
      root.append(svg("line", { class: "grid-line", x1: left, x2: width - right, y1: Y(t), y2: Y(t) }));
      root.append(svg("text", { x: left - 6, y: Y(t) + 4, "text-anchor": "end" }, this.spec.y.tick ? this.spec.y.tick(t) : number(t)));
    }
    const room = Math.max(2, Math.floor((width - left - right) / 75));
    let last = -Infinity;
    for (const t of this.state.logX ? logTicks(x0, x1, room) : linearTicks(x0, x1, room)) {
      if (X(t) - last < 42) continue;
      last = X(t);
      root.append(svg("line", { class: "grid-line", x1: X(t), x2: X(t), y1: top, y2: height - bottom }));
      root.append(svg("text", { x: Math.min(X(t), width - 16), y: height - bottom + 15, "text-anchor": "middle" }, this.spec.x.tick ? this.spec.x.tick(t) : number(t)));
    }
    root.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
    root.append(svg("text", { x: (left + width - right) / 2, y: height - 5, "text-anchor": "middle" }, this.spec.x.label));
    const lines = svg("g", { "clip-path": `url(#${id})`, fill: "none", "stroke-width": 2, "stroke-linejoin": "round" });
    for (const s of series) {
      const path = s.points.map(([x, y], i) => `${i ? "L" : "M"}${X(x).toFixed(1)},${Y(y).toFixed(1)}`).join("");
      lines.append(svg("path", { d: path, style: `stroke:${s.colour}`, "stroke-dasharray": s.dash || "none", "data-series": s.name }));
      const [ex, ey] = s.points[s.points.length - 1];
      lines.append(svg("circle", { cx: X(ex), cy: Y(ey), r: 2.6, style: `fill:${s.colour};stroke:none` }));
      const mark = el("i", { style: `border-color:${s.colour};border-top-style:${s.dash ? "dashed" : "solid"}` });
      this.legend.append(el("span", {}, mark, s.name));
    }
    root.append(lines);
    const cross = svg("line", { class: "cross", y1: top, y2: height - bottom, visibility: "hidden" });
    root.append(cross);
    root.onpointermove = (event) => this.hover(event, series, X, cross, width, left, right);
    root.onpointerdown = root.onpointermove;
    root.onpointerleave = () => { this.tip.hidden = true; cross.setAttribute("visibility", "hidden"); };
    this.plot.append(root);
  }
  hover(event, series, X, cross, width, left, right) {
    const frame = event.currentTarget.getBoundingClientRect();
    const at = ((event.clientX - frame.left) / frame.width) * width;
    if (at < left - 4 || at > width - right + 4) return;
    const rows = series.map((s) => {
      const near = s.points.reduce((a, b) => (Math.abs(X(b[0]) - at) < Math.abs(X(a[0]) - at) ? b : a));
      return { s, near, away: Math.abs(X(near[0]) - at) };
    });
    const best = rows.reduce((a, b) => (b.away < a.away ? b : a));
    const shown = rows.filter((r) => r.away < 40 || r === best).sort((a, b) => b.near[1] - a.near[1]).slice(0, 14);
    cross.setAttribute("x1", X(best.near[0]));
    cross.setAttribute("x2", X(best.near[0]));
    cross.setAttribute("visibility", "visible");
    const same = shown.every((r) => r.near[0] === best.near[0]);
    this.tip.replaceChildren(el("div", { class: "soft" }, `${this.spec.x.name} ${this.spec.x.format(best.near[0])}`));
    for (const r of shown) {
      const swatch = el("span", { class: "swatch", style: `background:${r.s.colour}` });
      const where = same ? "" : ` at ${this.spec.x.format(r.near[0])}`;
      this.tip.append(el("div", {}, el("span", {}, swatch, r.s.name), el("b", {}, this.spec.y.format(r.near[1]) + where)));
    }
    place(this.tip, this.box, event);
  }
}
function place(tip, box, event) {
  tip.hidden = false;
  const frame = box.getBoundingClientRect();
  const x = event.clientX - frame.left, y = event.clientY - frame.top;
  const leftSide = x > frame.width / 2;
  tip.style.left = `${Math.max(0, leftSide ? x - tip.offsetWidth - 14 : Math.min(x + 14, frame.width - tip.offsetWidth))}px`;
  tip.style.top = `${Math.max(0, y - tip.offsetHeight - 8)}px`;
}

// ---------------------------------------------------------------- class against client
class Heatmap {
  constructor(where, title, part) {
    this.part = part;
    this.box = el("figure", { "data-chart": title });
    this.canvas = el("canvas", { role: "img", "aria-label": title });
    this.tip = el("div", { class: "tip", hidden: "" });
    this.box.append(el("header", {}, el("h3", {}, title)), this.canvas, el("div", { class: "legend" }, part.note), this.tip);
    where.append(this.box);
    charts.push(this);
    this.canvas.onpointermove = (event) => this.hover(event);
    this.canvas.onpointerdown = this.canvas.onpointermove;
    this.canvas.onpointerleave = () => { this.tip.hidden = true; };
  }
  draw() {
    const { counts } = this.part, clients = counts.length, classes = counts[0].length;
    const width = this.box.clientWidth, left = 50, bottom = 34, row = Math.max(3, Math.min(20, 300 / classes));
    const height = Math.round(row * classes) + bottom, ratio = window.devicePixelRatio || 1;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.height = `${height}px`;
    const style = getComputedStyle(document.documentElement), pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.clearRect(0, 0, width, height);
    const cell = (width - left - 12) / clients, heat = style.getPropertyValue("--heat");
    counts.forEach((values, client) => {
      const total = values.reduce((a, b) => a + b, 0) || 1;
      values.forEach((value, label) => {
        if (!value) return;
        pen.fillStyle = `rgba(${heat}, ${0.12 + 0.88 * Math.sqrt(value / total)})`;
        pen.fillRect(left + client * cell, label * row, Math.max(cell - (cell > 5 ? 1 : 0), 0.6), row - (row > 6 ? 1 : 0));
      });
    });
    pen.fillStyle = style.getPropertyValue("--soft");
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "right";
    const every = Math.ceil(13 / row);
    for (let label = 0; label < classes; label += every) pen.fillText(label, left - 6, label * row + row / 2 + 4);
    pen.textAlign = "center";
    const of = clients < this.part.clients ? `${clients} of ${this.part.clients.toLocaleString("en")}` : clients;
    pen.fillText(`${of} clients, sorted by their most frequent class`, left + (width - left) / 2, height - 8);
    pen.textAlign = "left";
    pen.fillText("class", 0, 11);
    Object.assign(this, { cell, row, left });
  }
  hover(event) {
    const frame = this.canvas.getBoundingClientRect();
    const client = Math.floor((event.clientX - frame.left - this.left) / this.cell);
    const label = Math.floor((event.clientY - frame.top) / this.row);
    const values = this.part.counts[client];
    if (!values || values[label] === undefined) { this.tip.hidden = true; return; }
    const total = values.reduce((a, b) => a + b, 0);
    this.tip.replaceChildren(
      el("div", { class: "soft" }, `client ${this.part.order[client]}, class ${label}`),
      el("div", {}, el("b", {}, `${values[label]} of ${total} training examples`)));
    place(this.tip, this.box, event);
  }
}

// ---------------------------------------------------------------- the page
const runs = DATA.runs;
const groups = [...new Map(runs.map((r) => [r.group, r])).values()];
const shade = new Map(groups.map((r, i) => [r.group, i]));
const look = (r) => ({ name: r.name, colour: colour(shade.get(r.group)), dash: DASHES[Math.floor(shade.get(r.group) / 8) % 4], group: r.group });
// What is measured at evaluations stands apart from what every round has.
const lines = (x, y) => () => runs.map((r) => [r, r.evaluated[y] ? r.evaluated : r]).filter(([, from]) => from[y])
  .map(([r, from]) => ({ ...look(r), x: from[x], y: from[y] }));
const ROUND = { label: "round", name: "round", format: number, log: true };
const BYTES = { label: "sent by then, up and down together", name: "after", format: bytes, tick: bytes, log: true };
const SHARE = { format: percent, tick: (t) => `${number(100 * t)}%`, most: 1 };
const grid = (name) => document.getElementById(name);

const chips = document.getElementById("chips");
for (const r of groups) {
  const swatch = el("span", { class: "swatch", style: `background:${colour(shade.get(r.group))}` });
  const chip = el("button", { class: "chip", type: "button", "aria-pressed": "true" }, swatch, r.group);
  chip.onclick = () => {
    hidden.has(r.group) ? hidden.delete(r.group) : hidden.add(r.group);
    chip.setAttribute("aria-pressed", !hidden.has(r.group));
    charts.forEach((c) => c.draw());
  };
  chips.append(chip);
}
for (const [where, x] of [["bytes", BYTES], ["rounds", ROUND]]) {
  const field = where === "bytes" ? "bytes" : "round";
  new LineChart(grid(`accuracy-${where}`), { title: `Global accuracy against ${where}`, series: lines(field, "global_accuracy"), x, y: { ...SHARE, skip: true }, empty: "No run has been evaluated yet." });
  new LineChart(grid(`accuracy-${where}`), { title: `Local accuracy against ${where}`, series: lines(field, "local_accuracy"), x, y: { ...SHARE, skip: true }, empty: "No run has been evaluated yet." });
}
// Held-out loss, and metrics of a user's own.
const scores = [...new Set(runs.flatMap((r) => Object.keys(r.evaluated)))].filter((f) => /^(global|local)_/.test(f) && !f.endsWith("_accuracy") && !/_(nll|ece|brier)$/.test(f));
for (const field of scores) {
  const title = field === "global_loss" ? "Held-out loss, global" : field === "local_loss" ? "Held-out loss, local" : field.replace("_", " ");
  new LineChart(grid("scores"), { title, series: lines("round", field), x: ROUND, y: { format: (v) => v.toPrecision(3), log: true } });
}
if (!scores.length) document.getElementById("scores-section").hidden = true;
// Whether confidence is earned.
const reliable = runs.filter((r) => r.reliability[0].length);
for (const [field, what] of reliable.length ? [["nll", "Negative log-likelihood"], ["ece", "Calibration error"], ["brier", "Brier score"]] : []) {
  for (const where of ["global", "local"]) {
    new LineChart(grid("probabilities"), { title: `${what}, ${where}`, series: lines("round", `${where}_${field}`), x: ROUND, y: { format: (v) => v.toPrecision(3), log: true } });
  }
}
if (reliable.length) {
  new LineChart(grid("probabilities"), {
    title: "Reliability", x: { label: "confidence", name: "confidence", format: percent, tick: SHARE.tick }, y: { ...SHARE, zero: true },
    series: () => [{ name: "as sure as right", colour: "var(--soft)", dash: "2 3", x: [0, 1], y: [0, 1] },
      ...reliable.map((r) => ({ ...look(r), x: r.reliability[0], y: r.reliability[1] }))],
  });
}
if (!reliable.length) document.getElementById("probabilities-section").hidden = true;
new LineChart(grid("sparsity"), { title: "Sparsity over rounds", series: lines("round", "sparsity"), x: ROUND, y: { ...SHARE, zero: true } });
const sparse = runs.filter((r) => Object.keys(r.layers).length);
if (sparse.length) {
  const choose = el("select", { "aria-label": "run" });
  sparse.forEach((r, i) => choose.append(el("option", { value: i }, r.name)));
  const layered = new LineChart(grid("sparsity"), {
    title: "Sparsity, layer by layer", tools: sparse.length > 1 ? [choose] : [], x: ROUND, y: { ...SHARE, zero: true },
    series: () => {
      const r = sparse[choose.value || 0];
      return Object.entries(r.layers).map(([name, y], i) => ({ name, colour: colour(i), dash: DASHES[Math.floor(i / 8) % 4], x: r.evaluated.round, y }));
    },
  });
  choose.onchange = () => layered.draw();
}
// Units that are left, and why the others closed: a run at a time, a line a layer.
const counted = runs.filter((r) => Object.keys(r.units).length);
const causes = { closed_by_votes: "votes", closed_by_step: "the step" };
for (const closed of counted.length ? [false, true] : []) {
  const among = closed ? counted.filter((r) => Object.keys(r.closed_by_votes).length) : counted;
  if (!among.length) continue;
  const choose = el("select", { "aria-label": "run" });
  among.forEach((r, i) => choose.append(el("option", { value: i }, r.name)));
  const layered = new LineChart(grid("units"), {
    title: closed ? "Units closed until then, by cause" : "Units kept", tools: among.length > 1 ? [choose] : [],
    x: ROUND, y: { format: number, zero: true, log: true },
    series: () => {
      const r = among[choose.value || 0];
      return (closed ? Object.keys(causes) : ["units"]).flatMap((field, dashed) =>
        Object.entries(r[field]).map(([layer, y], i) => ({
          name: closed ? `${layer}, ${causes[field]}` : layer, colour: colour(i),
          dash: dashed ? "5 4" : "", x: r.evaluated.round, y })));
    },
  });
  choose.onchange = () => layered.draw();
}
if (!counted.length) document.getElementById("units-section").hidden = true;
const gated = runs.some((r) => r.evaluated.tv_mean);
for (const [field, what] of gated ? [["tv_mean", "mean"], ["tv_max", "largest"]] : []) {
  new LineChart(grid("agreement"), { title: `Gate disagreement |π − θ|, ${what}`, series: lines("round", field), x: ROUND, y: { format: (v) => v.toPrecision(3), zero: true, log: true } });
}
if (!gated) document.getElementById("agreement-section").hidden = true;
new LineChart(grid("cost"), {
  title: "Bytes a round, by direction", x: ROUND, y: { format: bytes, tick: bytes, zero: true, log: true },
  series: () => runs.flatMap((r) => [
    { ...look(r), name: `${r.name}, up`, dash: "", x: r.round, y: r.bytes_up },
    { ...look(r), name: `${r.name}, down`, dash: "5 4", x: r.round, y: r.bytes_down }]),
});
new LineChart(grid("cost"), { title: "Seconds a round", x: ROUND, y: { format: secondsText, zero: true, log: true }, series: lines("round", "seconds"), empty: "These runs have no times.jsonl." });
new LineChart(grid("cost"), { title: "Training loss", x: ROUND, y: { format: (v) => v.toPrecision(3), zero: true, log: true }, series: lines("round", "train_loss") });
DATA.partitions.forEach((part) => new Heatmap(grid("partition"), part.title, part));
if (!DATA.partitions.length) document.getElementById("partition-section").hidden = true;

const draw = () => charts.forEach((c) => c.draw());
let waiting = 0;
window.addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(draw); });
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
document.documentElement.dataset.ready = "true";

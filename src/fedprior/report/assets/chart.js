// ---------------------------------------------------------------- a chart of lines
const LEGEND = 12; // more lines than this have the list of runs for a legend
const ROWS = 8; // of the tip of a chart with more lines
class LineChart {
  // spec: title, series() -> [{name, look, group, x, y, error}], x/y: {label, format, log, zero, skip, whole}
  constructor(place, spec) {
    this.spec = spec;
    this.state = { logX: false, logY: false, whole: false };
    this.box = el("figure", { "data-chart": spec.title });
    const tools = el("span", { class: "tools" }, ...(spec.tools || []));
    if (spec.x.log) tools.append(this.toggle("log x", "logX"));
    if (spec.y.log) tools.append(this.toggle("log y", "logY"));
    if (spec.y.skip) tools.append(this.toggle("all values", "whole"));
    const header = el("header", {}, el("h3", {}, spec.title), tools);
    this.plot = el("div", { class: "plot", tabindex: "0", role: "group" });
    this.legend = el("div", { class: "legend" });
    this.tip = el("div", { class: "tip", hidden: "" });
    this.box.append(header, this.plot, this.legend, this.tip);
    this.plot.onkeydown = (event) => this.key(event);
    this.plot.onblur = () => this.leave();
    place.append(this.box);
    place.closest("section").hidden = false;
    charts.push(this);
  }
  toggle(name, key) {
    const button = toggle(name, false, "tool", () => {
      this.state[key] = !this.state[key];
      this.draw();
      return this.state[key];
    });
    button.setAttribute("aria-label", `${name}: ${this.spec.title}`);
    return button;
  }
  visible() {
    const keep = (v) => v !== null && Number.isFinite(v);
    return this.spec.series().filter((s) => !hidden.has(s.group)).map((s) => {
      const points = s.x.map((x, i) => [x, s.y[i], (s.error && s.error[i]) || 0]).filter(([x, y]) => keep(x) && keep(y)
        && (!this.state.logX || x > 0) && (!this.state.logY || y > 0));
      return { ...s, points };
    }).filter((s) => s.points.length);
  }
  range(series) {
    const xs = series.flatMap((s) => s.points.map((p) => p[0])), ys = series.flatMap((s) => s.points.map((p) => p[1]));
    let [x0, x1] = extent(xs), [y0, y1] = extent(ys);
    // Bands are seen whole; a logarithm has none below zero.
    y1 = Math.max(y1, extent(series.flatMap((s) => s.points.map(([, y, error]) => y + error)))[1]);
    if (!this.state.logY) y0 = Math.min(y0, extent(series.flatMap((s) => s.points.map(([, y, error]) => y - error)))[0]);
    if (!this.state.logX) x0 = 0;
    if (this.spec.y.zero && !this.state.logY) y0 = Math.min(0, y0);
    if (this.spec.y.skip && !this.state.whole) y0 = Math.max(y0, Math.min(this.start(series, ys), y1 - 0.02));
    if (y1 === y0) y1 = y0 + (Math.abs(y0) || 1) * 0.1;
    if (!this.state.logY) {
      const pad = 0.05 * (y1 - y0);
      y1 = this.spec.y.most === undefined ? y1 + pad : Math.min(y1 + pad, this.spec.y.most);
      if (!this.spec.y.zero) y0 = Math.max(y0 - pad, 0);
    }
    return [x0, x1, y0, y1];
  }
  // The steep first rounds would squeeze all that follows into one line; the second half of a line is never cut.
  start(series, ys) {
    const later = series.flatMap((s) => s.points.slice(Math.floor(s.points.length / 2)).map(([, y, error]) => y - error));
    return Math.min(quantile(ys, 0.2), extent(later)[0]);
  }
  draw() {
    const width = Math.max(this.box.clientWidth, 240), height = 250;
    const series = this.visible();
    this.leave();
    this.plot.replaceChildren();
    this.legend.replaceChildren();
    this.plot.setAttribute("aria-label", this.summary(series));
    if (!series.length) {
      this.plot.append(el("div", { class: "empty" }, this.spec.empty || "Nothing to show for the chosen runs."));
      return;
    }
    const [x0, x1, y0, y1] = this.range(series);
    const box = { left: 50, right: width - 12, top: 8, bottom: height - 38, width, height };
    const X = scale(x0, x1, box.left, box.right, this.state.logX), Y = scale(y0, y1, box.bottom, box.top, this.state.logY);
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" });
    const id = `clip${charts.indexOf(this)}`;
    const clip = svg("clipPath", { id });
    clip.append(svg("rect", { x: box.left, y: box.top - 4, width: box.right - box.left + 5, height: box.bottom - box.top + 8 }));
    root.append(clip);
    this.axes(root, box, X, Y, [x0, x1, y0, y1]);
    root.append(this.lines(series, X, Y, `url(#${id})`, y0));
    this.keys(series);
    const cross = svg("line", { class: "cross", y1: box.top, y2: box.bottom, visibility: "hidden" });
    root.append(cross);
    this.drawn = { series, X, Y, cross, box, root };
    root.onpointermove = (event) => this.hover(event);
    root.onpointerdown = root.onpointermove;
    root.onpointerleave = () => this.leave();
    this.plot.append(root);
  }
  axes(root, box, X, Y, [x0, x1, y0, y1]) {
    const { x, y } = this.spec;
    for (const t of this.state.logY ? logTicks(y0, y1, 6) : linearTicks(y0, y1, 5, y.whole)) {
      root.append(svg("line", { class: "grid-line", x1: box.left, x2: box.right, y1: Y(t), y2: Y(t) }));
      root.append(svg("text", { x: box.left - 6, y: Y(t) + 4, "text-anchor": "end" }, y.tick ? y.tick(t) : number(t)));
    }
    const room = Math.max(2, Math.floor((box.right - box.left) / 75));
    let last = -Infinity;
    for (const t of this.state.logX ? logTicks(x0, x1, room) : linearTicks(x0, x1, room, x.whole)) {
      if (X(t) - last < 42) continue;
      last = X(t);
      root.append(svg("line", { class: "grid-line", x1: X(t), x2: X(t), y1: box.top, y2: box.bottom }));
      root.append(svg("text", { x: Math.min(X(t), box.width - 16), y: box.bottom + 15, "text-anchor": "middle" }, x.tick ? x.tick(t) : number(t)));
    }
    root.append(svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
    root.append(svg("text", { x: (box.left + box.right) / 2, y: box.height - 5, "text-anchor": "middle" }, x.label));
  }
  lines(series, X, Y, clip, y0) {
    const drawn = svg("g", { "clip-path": clip, "stroke-width": series.length > 24 ? 1.4 : 2, "stroke-linejoin": "round" });
    const bands = svg("g", {}), lines = svg("g", { fill: "none" }), marks = svg("g", {});
    for (const s of series) {
      const at = ([x, y]) => `${X(x).toFixed(1)},${Y(y).toFixed(1)}`;
      if (s.error) {
        const edge = (sign) => s.points.map(([x, y, error]) => [x, this.state.logY ? Math.max(y + sign * error, y0) : y + sign * error]);
        const path = `M${[...edge(1), ...edge(-1).reverse()].map(at).join("L")}Z`;
        bands.append(svg("path", { class: "band", d: path, style: `fill:${colourOf(s.look)}`, "data-of": s.name }));
      }
      lines.append(svg("path", { d: `M${s.points.map(at).join("L")}`, style: `stroke:${colourOf(s.look)}`, "stroke-dasharray": s.look.dash || "none", "data-series": s.name, "data-of": s.name, "data-group": s.group || "" }));
      const [x, y] = s.points[s.points.length - 1], end = mark(s.look, X(x), Y(y));
      end.dataset.of = s.name;
      marks.append(end);
    }
    drawn.append(bands, lines, marks);
    return drawn;
  }
  keys(series) {
    if (series.length > LEGEND) {
      this.legend.append(el("span", {}, `${series.length} lines. Point at one to see which it is, or at a run in the list.`));
      return;
    }
    for (const s of series) {
      const key = el("span", {}, swatch(s.look), s.name);
      key.onpointerenter = () => this.stress(s.name);
      key.onpointerleave = () => this.stress();
      this.legend.append(key);
    }
  }
  // What a screen reader says of the chart.
  summary(series) {
    const { title, x, y } = this.spec;
    const ends = series.slice(0, LEGEND).map((s) => {
      const [, first] = s.points[0], [last, end] = s.points[s.points.length - 1];
      return `${s.name}: from ${y.format(first)} to ${y.format(end)} at ${x.name} ${x.format(last)}`;
    });
    const more = series.length > LEGEND ? ` And ${series.length - LEGEND} more.` : "";
    return series.length ? `${title}. ${ends.join(". ")}.${more} Arrow keys read values.` : `${title}: nothing to show.`;
  }
  // One line stands out, or all lines of a group.
  stress(name, group) {
    const among = this.drawn ? this.drawn.series.filter((s) => (name ? s.name === name : group && s.group === group)) : [];
    const kept = new Set(among.map((s) => s.name));
    this.plot.querySelectorAll("[data-of]").forEach((part) => part.classList.toggle("faint", kept.size > 0 && !kept.has(part.dataset.of)));
  }
  leave() {
    this.tip.hidden = true;
    if (!this.drawn) return;
    this.drawn.cross.setAttribute("visibility", "hidden");
    this.stress();
  }
  hover(event) {
    const { box, root } = this.drawn;
    const frame = root.getBoundingClientRect();
    const at = ((event.clientX - frame.left) / frame.width) * box.width;
    const height = ((event.clientY - frame.top) / frame.height) * box.height;
    if (at < box.left - 4 || at > box.right + 4) return;
    this.read(at, height);
    place(this.tip, this.box, event);
  }
  // The values at a place: all lines' where they are few, else those nearest to the pointer.
  read(at, height) {
    const { series, X, Y, cross } = this.drawn, { x, y } = this.spec;
    const rows = series.map((s) => {
      const near = s.points.reduce((a, b) => (Math.abs(X(b[0]) - at) < Math.abs(X(a[0]) - at) ? b : a));
      return { s, near, away: Math.abs(X(near[0]) - at), apart: height === undefined ? 0 : Math.abs(Y(near[1]) - height) };
    });
    const best = rows.reduce((a, b) => (b.away < a.away ? b : a));
    const close = rows.filter((r) => r.away < 40 || r === best).sort((a, b) => a.apart - b.apart);
    const shown = close.slice(0, series.length > LEGEND ? ROWS : LEGEND).sort((a, b) => b.near[1] - a.near[1]);
    this.stress(series.length > LEGEND && height !== undefined ? close[0].s.name : undefined);
    cross.setAttribute("x1", X(best.near[0]));
    cross.setAttribute("x2", X(best.near[0]));
    cross.setAttribute("visibility", "visible");
    const same = shown.every((r) => r.near[0] === best.near[0]);
    this.tip.replaceChildren(el("div", { class: "soft" }, `${x.name} ${x.format(best.near[0])}`));
    for (const r of shown) {
      const error = r.s.error ? ` ± ${y.format(r.near[2])}` : "";
      const value = y.format(r.near[1]) + error + (same ? "" : ` at ${x.format(r.near[0])}`);
      const row = el("div", {}, el("span", {}, swatch(r.s.look), r.s.name), el("b", {}, value));
      row.classList.toggle("nearest", series.length > LEGEND && r === close[0]);
      this.tip.append(row);
    }
    if (close.length > shown.length) this.tip.append(el("div", { class: "soft" }, `and ${close.length - shown.length} more`));
    return best.near[0];
  }
  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") this.leave();
    if (!this.drawn || (step === undefined && event.key !== "Home" && event.key !== "End")) return;
    event.preventDefault();
    const { series, X, box, root } = this.drawn;
    const places = [...new Set(series.flatMap((s) => s.points.map((p) => p[0])))].sort((a, b) => a - b);
    const here = places.indexOf(this.at), last = places.length - 1;
    const next = event.key === "Home" ? 0 : event.key === "End" || here < 0 ? last : Math.min(Math.max(here + step, 0), last);
    this.at = places[next];
    this.read(X(this.at));
    const frame = root.getBoundingClientRect();
    place(this.tip, this.box, { clientX: frame.left + (X(this.at) / box.width) * frame.width, clientY: frame.top + frame.height / 2 });
    document.getElementById("said").textContent = [...this.tip.children].map((row) => [...row.childNodes].map((part) => part.textContent).join(" ")).join(", ");
  }
}

// ---------------------------------------------------------------- class against client
class Heatmap {
  constructor(where, title, part) {
    this.part = part;
    this.box = el("figure", { "data-chart": title });
    this.canvas = el("canvas", { role: "img", "aria-label": title });
    this.tip = el("div", { class: "tip", hidden: "" });
    this.box.append(el("header", {}, el("h3", {}, title)), this.canvas, el("div", { class: "legend" }, part.note), this.tip);
    where.append(this.box);
    where.closest("section").hidden = false;
    charts.push(this);
    this.canvas.onpointermove = (event) => this.hover(event);
    this.canvas.onpointerdown = this.canvas.onpointermove;
    this.canvas.onpointerleave = () => { this.tip.hidden = true; };
  }
  stress() {}
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

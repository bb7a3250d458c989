// ---------------------------------------------------------------- the page's charts, section by section
// What is measured at evaluations stands apart from what every round has.
const lines = (x, y) => () => shownRuns().map((r) => [r, r.evaluated[y] ? r.evaluated : r]).filter(([, from]) => from[y])
  .map(([r, from]) => ({ ...look(r), x: from[x], y: from[y], error: from.error && from.error[y] }));
const ROUND = { label: "round", name: "round", format: number, log: true, whole: true };
const BYTES = { label: "sent by then, up and down together", name: "after", format: bytes, tick: bytes, log: true };
const SHARE = { format: percent, tick: (t) => `${number(100 * t)}%`, most: 1 };
const grid = (name) => document.getElementById(name);
// One run at a time, with a list to choose it from.
function ofOneRun(where, title, among, series, y) {
  const choose = el("select", { "aria-label": `run of: ${title}` });
  among.forEach((r, i) => choose.append(el("option", { value: i }, r.name)));
  const chart = new LineChart(grid(where), { title, tools: among.length > 1 ? [choose] : [], x: ROUND, y, series: () => series(among[choose.value || 0]) });
  choose.onchange = () => chart.draw();
}
choose();

for (const [where, x, field] of [["bytes", BYTES, "bytes"], ["rounds", ROUND, "round"]]) {
  for (const kind of ["global", "local"]) {
    const title = `${kind === "global" ? "Global" : "Local"} accuracy against ${where}`;
    new LineChart(grid(`accuracy-${where}`), { title, series: lines(field, `${kind}_accuracy`), x, y: { ...SHARE, skip: true }, empty: "No run has been evaluated yet." });
  }
}
// Held-out loss, and metrics of a user's own.
const scores = [...new Set(runs.flatMap((r) => Object.keys(r.evaluated)))].filter((f) => /^(global|local)_/.test(f) && !f.endsWith("_accuracy") && !/_(nll|ece|brier|worst|spread)$/.test(f));
for (const field of scores) {
  const title = field === "global_loss" ? "Held-out loss, global" : field === "local_loss" ? "Held-out loss, local" : field.replace("_", " ");
  new LineChart(grid("scores"), { title, series: lines("round", field), x: ROUND, y: { format: three, log: true } });
}
// Whether confidence is earned.
const reliable = runs.filter((r) => r.reliability[0].length);
for (const [field, what] of reliable.length ? [["nll", "Negative log-likelihood"], ["ece", "Calibration error"], ["brier", "Brier score"]] : []) {
  for (const where of ["global", "local"]) {
    new LineChart(grid("probabilities"), { title: `${what}, ${where}`, series: lines("round", `${where}_${field}`), x: ROUND, y: { format: three, log: true } });
  }
}
if (reliable.length) {
  new LineChart(grid("probabilities"), {
    title: "Reliability", x: { label: "confidence", name: "confidence", format: percent }, y: { ...SHARE, zero: true },
    series: () => [{ name: "as sure as right", look: { colour: "soft", dash: "2 3", mark: "circle" }, x: [0, 1], y: [0, 1] },
      ...reliable.map((r) => ({ ...look(r), x: r.reliability[0], y: r.reliability[1] }))],
  });
}
// Who is served badly.
const served = runs.filter((r) => r.clients.name);
const ways = [["own", "own model", ""], ["server", "server's", "5 4"]];
if (served.length) {
  const kind = served.every((r) => r.clients.name === "accuracy") ? { ...SHARE, zero: true } : { format: three, zero: true };
  new LineChart(grid("clients"), {
    title: "Distribution over clients", x: { label: "share of clients that have no more", name: "share", format: percent }, y: kind,
    series: () => served.flatMap((r) => ways.filter(([way]) => r.clients[way]).map(([way, text, dash]) =>
      ({ name: `${r.name}, ${text}`, group: r.group, look: { ...look(r).look, dash }, x: r.clients.share, y: r.clients[way] }))),
  });
  for (const [field, text] of [["gain", "Gain of a client's own model, by size"], ["own", "A client's own model, by size"]]) {
    if (!served.some((r) => r.clients.by_size.size)) break;
    new LineChart(grid("clients"), {
      title: text, x: { label: "training examples", name: "examples", format: number, log: true }, y: kind,
      series: () => served.filter((r) => r.clients.by_size.size).map((r) => ({ ...look(r), x: r.clients.by_size.size, y: r.clients.by_size[field] })),
    });
  }
  for (const where of ["global", "local"]) {
    const field = `${where}_${served[0].clients.name}_worst`;
    new LineChart(grid("clients"), { title: `Worst tenth of clients, ${where}`, series: lines("round", field), x: ROUND, y: kind });
  }
}
for (const [who, text] of [["unseen", "Clients that never took part, server's model"], ["newcomer", "The same after an E-step"]]) {
  const field = runs.some((r) => r.evaluated[`${who}_accuracy`]) ? `${who}_accuracy` : `${who}_loss`;
  if (runs.some((r) => r.evaluated[field])) new LineChart(grid("clients"), { title: text, series: lines("round", field), x: ROUND, y: field.endsWith("accuracy") ? { ...SHARE, skip: true } : { format: three, log: true } });
}
new LineChart(grid("sparsity"), { title: "Sparsity over rounds", series: lines("round", "sparsity"), x: ROUND, y: { ...SHARE, zero: true } });
const sparse = runs.filter((r) => Object.keys(r.layers).length);
if (sparse.length) {
  ofOneRun("sparsity", "Sparsity, layer by layer", sparse, (r) => Object.entries(r.layers).map(([name, y], i) =>
    ({ name, look: DATA.looks[i], x: r.evaluated.round, y })), { ...SHARE, zero: true });
}
// Units that are left, and why the others closed: a line a layer.
const COUNT = { format: number, zero: true, log: true, whole: true };
const counted = runs.filter((r) => Object.keys(r.units).length);
const byLayer = (r, field, text, dash) => Object.entries(r[field]).map(([layer, y], i) =>
  ({ name: layer + text, look: dash === undefined ? DATA.looks[i] : { ...DATA.looks[i], dash }, x: r.evaluated.round, y }));
if (counted.length) ofOneRun("units", "Units kept", counted, (r) => byLayer(r, "units", ""), COUNT);
const caused = counted.filter((r) => Object.keys(r.closed_by_votes).length);
if (caused.length) {
  ofOneRun("units", "Units closed until then, by cause", caused,
    (r) => [...byLayer(r, "closed_by_votes", ", votes", ""), ...byLayer(r, "closed_by_step", ", the step", "5 4")], COUNT);
}
for (const [field, what] of runs.some((r) => r.evaluated.tv_mean) ? [["tv_mean", "mean"], ["tv_max", "largest"]] : []) {
  new LineChart(grid("agreement"), { title: `Gate disagreement |π − θ|, ${what}`, series: lines("round", field), x: ROUND, y: { format: three, zero: true, log: true } });
}
new LineChart(grid("cost"), {
  title: "Bytes a round, by direction", x: ROUND, y: { format: bytes, tick: bytes, zero: true, log: true },
  series: () => ["up", "down"].flatMap((way) => lines("round", `bytes_${way}`)().map((s) =>
    ({ ...s, name: `${s.name}, ${way}`, look: { ...s.look, dash: way === "up" ? "" : "5 4" } }))),
});
new LineChart(grid("cost"), { title: "Seconds a round", x: ROUND, y: { format: secondsText, zero: true, log: true }, series: lines("round", "seconds"), empty: "These runs have no times.jsonl." });
new LineChart(grid("cost"), { title: "Training loss", x: ROUND, y: { format: three, zero: true, log: true }, series: lines("round", "train_loss") });
DATA.partitions.forEach((part) => new Heatmap(grid("partition"), part.title, part));

let waiting = 0;
window.addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(redraw); });
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
redraw();
document.documentElement.dataset.ready = "true";

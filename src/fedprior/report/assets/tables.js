// ---------------------------------------------------------------- tables that sort, and seeds that fold
document.querySelectorAll(".swatch[data-look]").forEach((spot) => spot.replaceWith(swatch(DATA.looks[spot.dataset.look])));

// The number that a cell begins with, else its text; what is missing comes last.
function valueOf(body, column) {
  const text = body.rows[0].cells[column].textContent.trim();
  const found = text.replaceAll(",", "").match(/^-?\d+(\.\d+)?(e[-+]?\d+)?(?=$|[\s%])/i);
  return text === "–" || text === "" ? null : found ? Number(found[0]) : text;
}
function compare(a, b) {
  if (a === null || b === null) return 0;
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}
function sortable(table) {
  const heads = [...table.tHead.rows[0].cells], first = [...table.tBodies];
  heads.forEach((head, column) => {
    const button = el("button", { class: "sort", type: "button" }, ...head.childNodes);
    head.append(button);
    button.onclick = () => {
      // Numbers begin with the largest, names with the first; a third click restores the page's own order.
      const numeric = first.some((body) => typeof valueOf(body, column) === "number");
      const ways = [numeric ? "descending" : "ascending", numeric ? "ascending" : "descending", null];
      const way = ways[(ways.indexOf(head.getAttribute("aria-sort")) + 1) % 3];
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      if (way) head.setAttribute("aria-sort", way);
      const keyed = first.map((body) => [valueOf(body, column), body]);
      const sorted = way ? keyed.sort(([a], [b]) => (a === null) - (b === null) || (way === "ascending" ? 1 : -1) * compare(a, b)) : keyed;
      table.append(...sorted.map(([, body]) => body));
    };
  });
}
document.querySelectorAll("table[data-sortable]").forEach(sortable);

document.querySelectorAll("tr.mean").forEach((row) => {
  const seeds = [...row.parentNode.rows].filter((other) => other.classList.contains("seed"));
  const button = el("button", { class: "fold", type: "button", "aria-expanded": "false", "aria-label": `the ${seeds.length} runs of ${row.parentNode.dataset.group}` });
  button.onclick = () => {
    const open = button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", String(open));
    seeds.forEach((seed) => { seed.hidden = !open; });
  };
  seeds.forEach((seed) => { seed.hidden = true; });
  row.cells[0].prepend(button);
});

// ---------------------------------------------------------------- which runs, and seeds as a mean or one by one
const runs = DATA.runs;
const groups = [...new Set(runs.map((r) => r.group))];
const lookOf = new Map(groups.map((group, i) => [group, DATA.looks[i]]));
const means = new Map(DATA.means.map((mean) => [mean.group, mean]));
const look = (r) => ({ name: r.name, look: lookOf.get(r.group), group: r.group });
// What charts of groups draw: the mean of a group's seeds where there is one, else its runs.
const shownRuns = () => (view.singles ? runs : groups.flatMap((group) => (means.has(group) ? [means.get(group)] : runs.filter((r) => r.group === group))));

const chips = new Map();
function redraw() {
  for (const [group, chip] of chips) chip.setAttribute("aria-pressed", String(!hidden.has(group)));
  const seeds = means.size ? (view.singles ? " · single runs" : " · seeds as mean ± s.e.") : "";
  document.getElementById("shown").textContent = `${groups.length - hidden.size} of ${groups.length} shown${seeds}`;
  charts.forEach((c) => c.draw());
}
function choose() {
  for (const group of groups) {
    const chip = toggle(group, true, "chip", () => {
      if (!hidden.delete(group)) hidden.add(group);
      redraw();
      return !hidden.has(group);
    });
    chip.prepend(swatch(lookOf.get(group)));
    chip.onpointerenter = chip.onfocus = () => charts.forEach((c) => c.stress(undefined, group));
    chip.onpointerleave = chip.onblur = () => charts.forEach((c) => c.stress());
    chips.set(group, chip);
  }
  document.getElementById("chips").append(...chips.values());
  const found = () => groups.filter((group) => !chips.get(group).hidden);
  const tool = (name, act) => {
    const button = el("button", { class: "tool", type: "button" }, name);
    button.onclick = () => { act(found()); redraw(); };
    return button;
  };
  const tools = document.getElementById("bar-tools"), filter = document.getElementById("filter");
  if (means.size) tools.append(toggle("single runs", false, "tool", () => { view.singles = !view.singles; redraw(); return view.singles; }));
  const tasks = [...new Set(runs.map((r) => r.task))], of = new Map(runs.map((r) => [r.group, r.task]));
  const onlyIf = (wanted) => groups.forEach((group) => (wanted(group) ? hidden.delete(group) : hidden.add(group)));
  if (tasks.length > 1) tools.append(...tasks.map((task) => tool(`only ${task}`, () => onlyIf((group) => of.get(group) === task))));
  tools.append(
    tool("show", (these) => these.forEach((group) => hidden.delete(group))),
    tool("hide", (these) => these.forEach((group) => hidden.add(group))),
    tool("only these", (these) => onlyIf((group) => these.includes(group))));
  filter.oninput = () => {
    const words = filter.value.toLowerCase().split(/\s+/);
    for (const [group, chip] of chips) chip.hidden = !words.every((word) => group.toLowerCase().includes(word));
  };
  filter.parentNode.classList.toggle("few", groups.length <= 8);
  const bar = document.getElementById("bar");
  bar.hidden = groups.length + means.size < 2;
  bar.open = groups.length <= 8 && window.innerWidth > 600;
  bar.onkeydown = (event) => { if (event.key === "Escape") { bar.open = false; bar.firstElementChild.focus(); } };
}

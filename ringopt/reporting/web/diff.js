// Two programs beside each other: what differs, where, by how much.
const graph = new Graph({...data.graph, ranks: data.ranks}), entries = graph.entries(0);
const [before, after] = data.totals, counts = {};
for (const entry of entries) counts[entry.kind] = (counts[entry.kind] || 0) + 1;
const KIND_COLOURS = {same: "faint", resized: "plain", rerouted: "gathered", changed: "gathered", replaced: "sharded", removed: "refused", added: "three"};
const bad = entries.filter((entry) => entry.error && entry.error.bad), slopes = entries.filter((entry) => entry.gradient && entry.gradient.bad).reverse(), change = (one, other, text) => one === other ? text(one) : `${text(one)} → ${text(other)}`;
byId("summary").textContent = data.summary;
byId("main").append(tiles([
  {label: "nodes", value: change(before.nodes, after.nodes, (count) => count.toLocaleString("en"))},
  {label: "nodes that differ", value: (entries.length - (counts.same || 0) - (counts.resized || 0)).toLocaleString("en"), share: 1 - ((counts.same || 0) + (counts.resized || 0)) / (entries.length || 1)},
  (before.bytes_sent || after.bytes_sent || before.bytes_sent === null || after.bytes_sent === null) && {label: "sent by this rank in one forward", value: change(before.bytes_sent, after.bytes_sent, bytesText)},
  {label: "FLOP of this rank", value: change(before.flops, after.flops, countText)},
  data.compared && {label: bad.length ? `of ${counted(data.compared, "value")} compared are off, the first %${bad[0].view.name}` : `${counted(data.compared, "value")} compared`, value: bad.length ? `${bad.length} off` : "all equal", share: bad.length / data.compared, colour: "refused"},
  data.gradients && {label: slopes.length ? `of ${counted(data.gradients, "gradient")} compared are off, the first %${slopes[0].view.name}` : `${counted(data.gradients, "gradient")} compared`, value: slopes.length ? `${slopes.length} off` : "all equal", share: slopes.length / data.gradients, colour: "refused"},
]));
byId("main").append(make("div", {style: "margin-top:16px"}, stack(graph.kindNames.map((kind) => ({name: kind, size: counts[kind] || 0, text: (counts[kind] || 0).toLocaleString("en"), colour: KIND_COLOURS[kind], count: true})), "nodes of each kind")));

// ---- the model, layer by layer ----
const modules = groupsOf(entries.filter((entry) => entry.view.op !== "input"), (entry) => entry.module).map((all) => ({module: all[0].module, all})).sort((one, other) => middle(one) - middle(other));
function middle(module) { return module.all[module.all.length >> 1].index; }  // what reads parameters alone stands anywhere
const heatOf = (all) => sum(all.map((entry) => QUIET.has(entry.kind) ? 0 : 1)) / all.length;
// The more a value is off the deeper its colour, a step for each power of ten below the worst.
const worstOf = (all, what) => most(all.map((entry) => entry[what] && entry[what].bad ? size(entry[what].relative) : 0).filter(Number.isFinite)) || (all.some((entry) => entry[what] && entry[what].bad) ? Infinity : 0);
const deepest = most(["error", "gradient"].map((what) => worstOf(entries.filter((entry) => Number.isFinite(worstOf([entry], what))), what))), depthOf = (worst) => Number.isFinite(worst) && deepest ? Math.max(.25, 1 + .25 * Math.log10(worst / deepest)) : 1;
if (modules.length > 1) {
  const units = layersOf(modules, (module) => module.module);
  for (const unit of units) {
    unit.all = unit.modules.flatMap((module) => module.all);
    unit.parts = groupsOf(unit.modules, (module) => module.module.slice(unit.key.length + 1).split(".")[0]).map((group) => {
      const all = group.flatMap((module) => module.all), value = worstOf(all, "error"), slope = worstOf(all, "gradient"), heat = heatOf(all);
      return {weight: all.length, colour: tint(value ? "refused" : heat ? "sharded" : slope ? "gathered" : "plain"), opacity: value ? depthOf(value) : heat ? .35 + .65 * heat : slope ? depthOf(slope) : .45};
    });
  }
  const told = (unit) => {
    const kinds = {};
    for (const entry of unit.all) kinds[entry.kind] = (kinds[entry.kind] || 0) + 1;
    return [Object.entries(kinds).map(([kind, count]) => `${count} ${kind}`).join(", "), `${bytesText(sum(unit.all.map((entry) => entry.after && entry.after.sent)))} sent`].join(" · ");
  };
  section("layers", "The model, layer by layer").append(strip(units, [
    {name: "differ", text: (value) => counted(value, "node"), colour: "sharded", of: (unit) => sum(unit.all.map((entry) => QUIET.has(entry.kind) ? 0 : 1))},
    {name: "sent", text: bytesText, colour: "four", of: (unit) => sum(unit.all.map((entry) => entry.after && entry.after.sent))},
    ...["error", "gradient"].map((what) => ({name: what === "error" ? "values off" : "gradients off", text: short, colour: what === "error" ? "refused" : "gathered", of: (unit) => { const worst = worstOf(unit.all, what); return Number.isFinite(worst) ? worst : deepest; }})),
  ], told, (unit) => look(unit.key)), legend([["sharded", "nodes differ"], ["plain", "nothing differs"], ...(bad.length ? [["refused", "a value is off: the deeper the more"]] : []), ...(slopes.length ? [["gathered", "only gradients are off"]] : [])]));
}

// ---- attentions ----
function size(value) { return Math.abs(Number(value === "inf" || value === "-inf" ? Infinity : value)); }
const siteText = (site) => !site ? "-" : site.strategy === "none" ? site.pattern : `${site.pattern}: ${site.strategy}, ${site.layout}, ${site.kernel}`;
const picture = (site) => site && site.mask.length ? {seen: site.mask, ranks: site.ranks, steps: site.steps} : null;
const sited = entries.filter((entry) => (entry.before && entry.before.site) || (entry.after && entry.after.site));
if (sited.length) {
  const sides = (entry) => [entry.before && entry.before.site, entry.after && entry.after.site];
  const groups = groupsOf(sited, (entry) => JSON.stringify([sides(entry), entry.kind])), reasonOf = (entry) => sides(entry).filter(Boolean).map((site) => site.reason).filter(Boolean).pop() || "";
  section("attention", counted(sited.length, "attention site")).append(table("sites", [{name: "module"}, {name: "mask"}, {name: "before"}, {name: "after"}, {name: "reason"}], groups.map((group) => ({
    text: group.map((entry) => entry.low).join(" ") + sides(group[0]).map(siteText).join(" ") + reasonOf(group[0]),
    more: () => make("div", {class: "columns"}, sides(group[0]).map((site, place) => make("div", {}, make("h3", {}, place ? "after" : "before"), site ? [maskFigure(picture(site)), facts({pattern: site.pattern, strategy: site.strategy, layout: site.layout, kernel: site.kernel, refused: site.reason}), make("pre", {}, (place ? group[0].after : group[0].before).text)] : make("p", {class: "quiet"}, "not there"))),
      group.length > 1 ? make("p", {class: "name quiet"}, group.map((entry) => entry.module).join("  ")) : ""),
    cells: [make("span", {}, group.length > 1 ? make("span", {class: "times"}, `${group.length} ×`) : "", make("span", {class: "name"}, named(group.map((entry) => entry.view.module || "-")))), picture(sides(group[0])[1]) || picture(sides(group[0])[0]) ? maskSvg(picture(sides(group[0])[1]) || picture(sides(group[0])[0]), true) : "", siteText(sides(group[0])[0]), siteText(sides(group[0])[1]), reasonOf(group[0]) ? make("span", {class: "refused"}, reasonOf(group[0])) : ""],
  }))));
}

// ---- numbers on the nodes ----
const ROWS = 100;
let metric = data.metrics[0] || null, view = null;
if (data.metrics.length) {
  const place = section("numbers", data.metrics[0].error ? "Values, run on the same inputs" : "Numbers"), said = make("span", {class: "quiet", id: "numbers-told"}), below = make("div", {}), chart = make("div", {});
  const select = make("select", {id: "metric", "aria-label": "numbers", on: {change: () => { metric = data.metrics[select.selectedIndex]; drawNumbers(); }}}, data.metrics.map((one) => make("option", {}, one.name)));
  place.append(make("p", {class: "bar"}, select, said), chart, below);
  const drawNumbers = () => {
    const known = metric.values.map((value, index) => ({value, index})).filter(({value}) => value !== null), errorOf = ({index}) => metric.error ? entries[index][metric.gradient ? "gradient" : "error"] : null, isBad = (one) => Boolean(errorOf(one) && errorOf(one).bad), ordered = (list) => metric.gradient ? [...list].reverse() : list;
    const sizes = known.map(({value}) => size(value)).filter((value) => value > 0 && Number.isFinite(value)), largest = most(sizes) || 1, least = Math.min(...sizes.slice(0, 50000), largest), wide = largest / least > 100;
    const height = (value) => !(size(value) > 0) ? 0 : !Number.isFinite(size(value)) ? 1 : wide ? .15 + .85 * Math.log(size(value) / least) / Math.log(largest / least) : size(value) / largest;
    const svg = draw("svg", {id: "strip", viewBox: `0 0 ${metric.values.length} 1`, preserveAspectRatio: "none", role: "img", style: "display:block;width:100%;height:64px;background:var(--panel);border:1px solid var(--rule);border-radius:8px", "aria-label": "one bar a node, in order of computation"});
    const drawn = known.length > 3000 ? [...known].sort((one, other) => size(other.value) - size(one.value)).slice(0, 3000) : known;
    for (const one of drawn) svg.append(draw("rect", {x: one.index, y: 1 - height(one.value), width: Math.max(1, metric.values.length / 1200), height: height(one.value), class: isBad(one) ? "bad" : "", style: `fill:${tint(isBad(one) ? "refused" : "sharded")}`}, draw("title", {}, `%${entries[one.index].view.name}: ${short(one.value)}`)));
    svg.addEventListener("click", (event) => { const at = [...svg.querySelectorAll("rect")].indexOf(event.target); if (at >= 0) show(drawn[at].index); });
    chart.replaceChildren(make("figure", {}, svg, make("figcaption", {}, `one bar a node, in order of computation; ${wide ? "logarithmic, " : ""}up to ${short(largest)}`)));
    const off = ordered(known.filter(isBad)), top = known.filter(({value}) => size(value) !== 0).sort((one, other) => size(other.value) - size(one.value)).slice(0, ROWS);
    const rows = !metric.error ? top : off.length ? off.slice(0, ROWS) : ordered(top.sort((one, other) => one.index - other.index));
    said.textContent = `${counted(known.length, "node")}, ${rows.length} shown ${metric.gradient ? "in order of the backward" : metric.error ? "in order of computation" : "by size"}${off.length ? `; the first that is off: %${entries[off[0].index].view.name}` : ""}`;
    below.replaceChildren(rows.length ? make("div", {class: "tall", tabindex: 0, role: "group", "aria-label": "the nodes"}, table("values", [{name: "node"}, {name: "number", number: true}, {name: "module, or line"}], rows.map((one) => ({
      text: entries[one.index].low, cells: [make("button", {type: "button", class: `plain name value${isBad(one) ? " refused" : ""}`, on: {click: () => show(one.index)}}, `%${entries[one.index].view.name} = ${entries[one.index].view.op}`), meter(Number.isFinite(size(one.value)) ? size(one.value) : largest, largest, short(one.value), isBad(one) ? "refused" : "sharded"), entries[one.index].view.module || entries[one.index].view.source || "-"],
    })), {label: metric.name})) : "");
    if (view) heat();
  };
  const show = (index) => { view.reveal(entries[index]); view.select(entries[index]); view.box.scrollIntoView({block: "nearest"}); };
  const heat = () => { view.metric = (entry) => metric.values[entry.index]; view.largest = most(metric.values.map((value) => value === null ? 0 : size(value)).filter(Number.isFinite)) || 1; view.redraw(); };
  drawNumbers();
  view = new GraphView(graph, section("nodes", "Nodes", "by module, in the order of the program"));
  heat();
} else view = new GraphView(graph, section("nodes", "Nodes", "by module, in the order of the program"));
view.overlaid = (entry) => facts(Object.fromEntries(data.metrics.filter((one) => one.overlay && one.values[entry.index] !== null).map((one) => [one.name, short(one.values[entry.index])])));
view.show(0, false);

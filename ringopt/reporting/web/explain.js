// What became of a model: the strip, attentions, modules, what is gathered, memory; then the graph after each pass.
const report = data.report, sites = report.sites, refusedIn = new Set(sites.filter((site) => site.refusal).map((site) => site.module));
const timeOf = (site) => site.predictions.length ? site.predictions[0].seconds : 0;
const attentions = sites.filter((site) => site.form !== "scan"), scans = sites.filter((site) => site.form === "scan");
const done = (list) => list.filter((site) => !site.refusal).length;
const held = sum(Object.values(report.memory));
byId("summary").textContent = `what ${counted(report.world_size, "rank")} would do, seen from one of them`;
byId("main").append(tiles([
  attentions.length && {label: "attentions on shards", value: `${done(attentions)} of ${attentions.length}`, share: done(attentions) / attentions.length, colour: done(attentions) < attentions.length ? "refused" : "sharded"},
  scans.length && {label: "recurrences on shards", value: `${done(scans)} of ${scans.length}`, share: done(scans) / scans.length},
  {label: "of the matrix work is on shards", value: percentText(report.sharded_fraction), share: report.sharded_fraction},
  {label: "FLOP of products, all ranks", value: countText(report.matrix_flops)},
  {label: "sent by a rank in one forward", value: bytesText(report.bytes_sent)},
  held && {label: "held by a rank, at most, in one forward", value: bytesText(held)},
  sum(sites.map(timeOf)) && {label: "of all attentions, predicted", value: secondsText(sum(sites.map(timeOf)))},
]));
if (report.refusal) byId("main").append(make("p", {class: "warning", id: "refusal"}, `not sharded: ${report.refusal}`));

// ---- the model, layer by layer ----
const stateOf = (module) => refusedIn.has(module.module) ? "refused" : module.gathered ? "gathered" : module.whole ? "gathered" : module.flops || module.sent ? "sharded" : "plain";
const STATES = {sharded: "on shards", gathered: "whole on every rank, or gathered", refused: "refused", plain: "no products"};
const sharesOf = (modules, name) => sum(modules.map((module) => module[name]));
function toldOf(modules) {
  const of = sites.filter((site) => modules.some((module) => module.module === site.module));
  const parts = [countText(sharesOf(modules, "flops")) + " FLOP", bytesText(sharesOf(modules, "sent")) + " sent", bytesText(sharesOf(modules, "held")) + " made"];
  if (sharesOf(modules, "gathered")) parts.push(`${bytesText(sharesOf(modules, "gathered"))} needed whole`);
  if (sharesOf(modules, "seconds")) parts.push(`attention ${secondsText(sharesOf(modules, "seconds"))}`);
  return [...of.map((site) => site.refusal ? `refused: ${site.refusal}` : `${site.pattern}, ${site.strategy}, ${site.layout}`), ...parts].join(" · ");
}
if (report.modules.length) {
  const place = section("layers", "The model, layer by layer");
  const units = layersOf(report.modules, (module) => module.module);
  for (const unit of units) {  // what stands directly in a layer, by its products
    const inside = groupsOf(unit.modules, (module) => module.module.slice(unit.key.length + 1).split(".")[0]), largest = most(inside.map((group) => sharesOf(group, "flops"))) || 1;
    unit.parts = inside.map((group) => {
      const states = group.map(stateOf), worst = ["refused", "gathered", "sharded", "plain"].find((one) => states.includes(one));
      return {weight: .04 + sharesOf(group, "flops") / largest, colour: tint(worst), opacity: worst === "plain" ? .6 : 1};
    });
  }
  place.append(strip(units, [
    {name: "FLOP", text: countText, colour: "one", of: (unit) => sharesOf(unit.modules, "flops")},
    {name: "sent", text: bytesText, colour: "four", of: (unit) => sharesOf(unit.modules, "sent")},
    {name: "gathered", text: bytesText, colour: "gathered", of: (unit) => sharesOf(unit.modules, "gathered")},
    {name: "attention", text: secondsText, colour: "three", of: (unit) => sharesOf(unit.modules, "seconds")},
  ], (unit) => toldOf(unit.modules), (unit) => look(unit.key)), legend(Object.entries(STATES).filter(([state]) => report.modules.some((module) => stateOf(module) === state))));
}

// ---- attentions: equal ones once ----
const bare = (note) => note.replace(/ \([^()]*\)| [\d,]+ more|(out|behind the gradients of) .*/g, "");  // a note without its numbers
const alike = (site) => JSON.stringify({...site, module: "", source: "", notes: site.notes.map(bare), picture: site.picture && site.picture.seen});
function choicesOf(predictions) {
  const slowest = most(predictions.map((one) => one.seconds));
  return make("figure", {class: "matter"}, make("h3", {}, "Strategies that were compared", make("small", {}, "predicted, of a rank")), make("div", {}, predictions.map((one, place) => [
    make("span", {}, one.strategy, place ? "" : make("span", {class: "tag", style: "margin-left:6px"}, "taken")),
    make("span", {class: "line"}, make("i", {vars: {share: `${100 * one.seconds / slowest}%`, tint: tint(place ? "plain" : "sharded")}})),
    make("span", {class: "right"}, secondsText(one.seconds)),
    make("span", {class: "right held"}, `${bytesText(one.bytes)} sent, `, one.fits ? `holds ${bytesText(one.held)}` : make("span", {class: "refused"}, `holds ${bytesText(one.held)}: too much`)),
  ])));
}
function siteDetails(group) {
  const site = group[0], notes = site.notes.filter((note) => !(site.predictions.length && note.startsWith("strategy ")));
  const lines = groupsOf(group.filter((one) => one.source), (one) => one.source).map((same) => make("li", {}, make("code", {}, same[0].source), same.length > 1 ? make("small", {}, ` ${same.length} ×`) : ""));
  return make("div", {class: "columns"}, make("div", {}, maskFigure(site.picture)), make("div", {},
    site.refusal ? make("p", {class: "warning"}, `refused: ${site.refusal}`) : "", site.not_dilated ? make("p", {class: "warning"}, `not dilated: ${site.not_dilated}`) : "",
    site.predictions.length ? choicesOf(site.predictions) : "",
    notes.length ? make("ul", {class: "plain"}, notes.map((note) => make("li", {}, note))) : "",
    lines.length ? [make("h3", {}, "Where it is written"), make("ul", {class: "plain"}, lines)] : "",
    group.length > 1 ? make("p", {class: "name quiet"}, group.map((one) => one.module).join("  ")) : ""));
}
if (sites.length) {
  const place = section("attention", [attentions.length ? counted(attentions.length, "attention site") : "", scans.length ? counted(scans.length, "scan") : ""].filter(Boolean).join(" and "));
  const groups = groupsOf(sites, alike), sent = most(sites.map((site) => site.bytes_sent)), slowest = most(sites.map(timeOf));
  place.append(table("sites", [{name: "module"}, {name: "mask"}, {name: "pattern"}, {name: "form"}, {name: "strategy"}, {name: "layout"}, {name: "kernel"}, {name: "sent", number: true}, {name: "predicted", number: true}], groups.map((group) => {
    const site = group[0];
    return {
      text: group.map((one) => `${one.module} ${one.source}`).join(" ") + JSON.stringify({...site, picture: null}),
      more: () => siteDetails(group),
      cells: [make("span", {}, group.length > 1 ? make("span", {class: "times"}, `${group.length} ×`) : "", make("span", {class: "name"}, named(group.map((one) => one.module || "-")))),
        site.picture ? maskSvg(site.picture, true) : "", make("td", {}, site.pattern, site.refusal ? [make("br"), make("span", {class: "refused"}, `refused: ${site.refusal}`)] : ""),
        make("td", {class: "word"}, site.form), make("td", {class: "word"}, site.refusal ? make("span", {class: "tag bad"}, "refused") : make("span", {class: "tag"}, site.strategy)), make("td", {class: "word"}, site.layout), make("td", {class: "word"}, site.kernel),
        meter(site.bytes_sent, sent, bytesText(site.bytes_sent), "four"), meter(timeOf(site), slowest, timeOf(site) ? secondsText(timeOf(site)) : "-", "three")],
    };
  })));
} else section("attention", "No attention site");

// ---- what every rank has whole ----
if (report.gathers.length) {
  const groups = groupsOf(report.gathers, (one) => `${one.op}|${one.why}|${one.bytes}`).sort((one, other) => sum(other.map((each) => each.bytes)) - sum(one.map((each) => each.bytes)));
  const largest = most(groups.map((group) => sum(group.map((one) => one.bytes))));
  section("whole", `${counted(report.gathers.length, "value")} needed whole`).append(table("gathers", [{name: "op"}, {name: "module"}, {name: "why"}, {name: "bytes", number: true}], groups.map((group) => ({
    more: group.some((one) => one.source) ? () => make("ul", {class: "plain"}, [...new Set(group.map((one) => one.source))].map((line) => make("li", {}, make("code", {}, line)))) : null,
    text: group.map((one) => `${one.module} ${one.source} ${one.op} ${one.why}`).join(" "),
    cells: [make("span", {}, group.length > 1 ? make("span", {class: "times"}, `${group.length} ×`) : "", group[0].op), make("td", {class: "name"}, named(group.map((one) => one.module || "-"))), group[0].why, meter(sum(group.map((one) => one.bytes)), largest, bytesText(sum(group.map((one) => one.bytes))), "gathered")],
  }))));
}
if (report.outputs.length) section("outputs", `${counted(report.outputs.length, "output")} not gathered`).append(table("outputs-table", [{name: "output"}, {name: "form"}, {name: "placement"}, {name: "layout"}, {name: "bytes", number: true}], report.outputs.map((one) => ({cells: [one.name, one.form, one.placement, one.layout, meter(one.bytes, 0, bytesText(one.bytes))]}))));
if (held) {
  const colours = ["one", "five", "three", "two", "four"];
  section("memory", "Memory of this rank", bytesText(held)).append(stack(Object.entries(report.memory).map(([name, size], place) => ({name, size, text: bytesText(size), colour: colours[place % 5]})), "memory"));
}

// ---- modules in the order of the program ----
if (report.modules.length) {
  const columns = [["FLOP", "flops", countText, "one"], ["whole", "whole", countText, "gathered"], ["sent", "sent", bytesText, "four"], ["gathered", "gathered", bytesText, "gathered"], ["made", "held", bytesText, "five"]]
    .filter(([, name]) => sharesOf(report.modules, name));
  const tree = moduleTree(report.modules), largest = Object.fromEntries(columns.map(([, name]) => [name, most(report.modules.map((module) => module[name]))]));
  const body = make("tbody"), head = make("tr", {}, make("th", {scope: "col"}, "module"), make("th", {class: "number", scope: "col"}, "nodes"), columns.map(([name]) => make("th", {class: "number", scope: "col"}, name)));
  section("modules", "Modules", "in the order of the program; FLOP and bytes of this rank").append(make("div", {class: "wide"}, make("table", {id: "tree"}, make("thead", {}, head), body)));
  const lineOf = (branch, depth) => {
    const names = branch.fold ? named(branch.fold.map((one) => one.name)) : branch.name, inner = branch.fold ? branch.fold : branch.children;
    const state = branch.all.map(stateOf).sort((one, other) => Object.keys(STATES).reverse().indexOf(other) < Object.keys(STATES).reverse().indexOf(one) ? 1 : -1);
    const worst = ["refused", "gathered", "sharded", "plain"].find((one) => state.includes(one));
    const label = [make("i", {class: "key", vars: {tint: tint(worst)}, title: STATES[worst]}), branch.fold ? make("span", {class: "times"}, `${branch.fold.length} ×`) : "", make("span", {class: "name"}, names || "(no module)")];
    const first = make("td", {style: `padding-left:${depth * 18}px`}), line = make("tr", {class: "row", "data-text": branch.all.map((module) => module.module).join(" ")}, first, make("td", {class: "number"}, sum(branch.all.map((module) => module.nodes)).toLocaleString("en")),
      columns.map(([, name, text, colour]) => meter(sharesOf(branch.all, name), most([sharesOf(tree.all, name)]), sharesOf(branch.all, name) ? text(sharesOf(branch.all, name)) : "", colour)));
    if (!inner.length) first.append(make("span", {class: "twist"}, ""), ...label);
    else {
      let lines = null;
      const button = make("button", {type: "button", class: "plain", "aria-expanded": "false"}, make("span", {class: "twist", "aria-hidden": "true"}, "▸"), ...label);
      button.addEventListener("click", () => {
        const open = button.getAttribute("aria-expanded") !== "true";
        button.setAttribute("aria-expanded", open);
        lines = lines || (branch.fold ? inner : foldedBranches(inner)).map((one) => lineOf(one, depth + 1));
        if (open) line.after(...lines);
        else for (const one of lines) { one.querySelector("[aria-expanded=true]")?.click(); one.remove(); }
        highlight();
      });
      first.append(button);
    }
    return line;
  };
  body.append(...foldedBranches(tree.children).sort((one, other) => !one.name - !other.name).map((one) => lineOf(one, 0)));
  const first = body.rows.length < 3 ? body.querySelector("button") : null;
  if (first) first.click();
}
for (const [id, title, entries] of [["left", "Left alone", report.left_alone], ["notes", "Notes", report.notes]])
  if (entries.length) section(id, title).append(make("ul", {class: "plain"}, groupsOf(entries, (entry) => entry).map((same) => make("li", {class: "row"}, same.length > 1 ? make("span", {class: "times"}, `${same.length} ×`) : "", same[0]))));
data.graphs.forEach((graph, place) => passesOf(graph, section(`graph${place}`, data.graphs.length > 1 ? `Graph ${place + 1} of ${data.graphs.length}, pass by pass` : "The graph, pass by pass")));

function moduleTree(modules) {
  const top = {name: "", path: "", children: [], all: modules};
  for (const module of modules) {
    let at = top;
    for (const part of module.module.split(".")) {
      let next = at.children.find((child) => child.name === part);
      if (!next) at.children.push(next = {name: part, children: [], all: []});
      next.all.push(module);
      at = next;
    }
  }
  return top;
}
function foldedBranches(children) {  // equal siblings that differ in their number are one
  const key = (child) => /^\d+$/.test(child.name) ? JSON.stringify(child.all.map((one) => ({...one, module: one.module.split(".").slice(one.module.split(".").indexOf(child.name) + 1).join(".")}))) : `one ${child.name}`;
  return groupsOf(children, key).flatMap((group) => group.length < 3 ? group : [{name: "", fold: group, children: group, all: group.flatMap((one) => one.all)}]);
}

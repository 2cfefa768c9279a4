// The model as a strip: a cell a layer, in the order of the program; lanes of numbers under it.
// units: [{key, parts: [{name, weight, colour, opacity, text}], numbers: {lane: value}}]
function layersOf(modules, pathOf) {  // modules of one layer, or of one name outside of layers, are a unit
  const units = [];
  for (const module of modules) {
    const parts = pathOf(module).split("."), number = parts.findIndex((part) => /^\d+$/.test(part));
    const key = number < 0 ? parts.slice(0, 2).join(".") : parts.slice(0, number + 1).join(".");
    const known = units.find((unit) => unit.key === key);
    if (known) known.modules.push(module); else units.push({key, modules: [module]});
  }
  // What the layers share, such as a table of positions, stands where the first needed it: before them. What is in no module stands anywhere.
  const numbered = (unit) => /\.?\d+$/.test(unit.key), first = units.findIndex(numbered), last = units.findLastIndex(numbered), homeless = (unit) => !unit.key || unit.key.startsWith("(");
  const shared = units.filter((unit, place) => place > first && place < last && !numbered(unit)), rest = units.filter((unit) => !homeless(unit) && !shared.includes(unit)), at = Math.max(0, rest.findIndex(numbered));
  return [...rest.slice(0, at), ...shared.filter((unit) => !homeless(unit)), ...rest.slice(at), ...units.filter(homeless)];
}
function strip(units, lanes, told, chosen) {
  // lanes: [{name, unit: text of a value, of: unit -> value, colour}]; told: unit -> text; chosen: called with a unit
  const readout = make("p", {class: "readout quiet", role: "status"}, "Point at a layer, or go through them with the arrow keys; Enter shows its modules.");
  const tell = (unit) => readout.replaceChildren(make("span", {class: "name"}, unit.key || "outside of modules"), `  ${told(unit)}`);
  const cells = units.map((unit, place) => make("button", {
    type: "button", class: "layer", tabindex: place ? -1 : 0, "aria-label": `${unit.key}: ${told(unit)}`, title: unit.key,
    on: {
      mouseenter: () => tell(unit), focus: () => tell(unit), click: () => chosen(unit),
      keydown: (event) => {
        const next = {ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: units.length - 1}[event.key];
        if (next === undefined || !cells[next]) return;
        event.preventDefault();
        cells[place].tabIndex = -1;
        cells[next].tabIndex = 0;
        cells[next].focus();
      },
    },
  }, unit.parts.map((part) => make("i", {vars: {w: part.weight, tint: part.colour, o: part.opacity ?? 1}}))));
  const found = make("div", {class: "strip", vars: units.length > 80 ? {gap: "0px"} : {}}, make("span", {class: "label"}, counted(units.length, "layer")), make("div", {class: "cells"}, cells));
  for (const lane of lanes) {
    const values = units.map(lane.of), largest = most(values);
    if (!largest) continue;
    found.append(make("span", {class: "label"}, lane.name, make("br"), ` to ${lane.text(largest)}`), make("div", {class: "cells", "aria-hidden": "true"}, values.map((value) =>
      make("div", {class: "lane"}, make("i", {vars: {share: `${100 * (value || 0) / largest}%`, tint: tint(lane.colour), least: value ? "1px" : "0"}})))));
  }
  const every = Math.ceil(units.length / 24);
  found.append(make("span", {class: "label"}), make("div", {class: "cells ticks", "aria-hidden": "true"}, units.map((unit, place) => {
    const last = unit.key.split(".").at(-1), numbered = /^\d+$/.test(last), name = !unit.key || unit.key.startsWith("(") ? "else" : last;
    return make("span", {title: unit.key, class: !numbered ? "wordy" : units.length > 16 && Math.floor(+last / every) % 2 ? "odd" : ""}, !numbered || +last % every === 0 ? name : "");
  })));
  return make("div", {class: "panel"}, found, readout);
}

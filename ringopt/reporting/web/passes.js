// The line of passes: a slider through the graph after each, what the pass changed, what was refused in it.
function passesOf(source, place) {
  const graph = new Graph({...source, ranks: data.report ? data.report.world_size : 2}), last = graph.frames.length - 1;
  const did = graph.frames.map((frame, at) => at === 0 ? 0 : frame.changes.filter((change) => !Array.isArray(change) && !QUIET.has(graph.kindNames[change.k])).length), largest = most(did.slice(0, last)) || 1;
  const bars = graph.frames.map((frame, at) => make("button", {type: "button", class: frame.refused.length ? "lost" : did[at] ? "did" : "", tabindex: -1, title: `${frame.name}: ${at ? counted(did[at], "change") : "the graph as captured"}${frame.refused.length ? `, ${frame.refused.length} refused` : ""}`, on: {click: () => step(at)}}, make("i", {vars: {share: `${at ? Math.min(100, 8 + 92 * Math.log2(1 + did[at]) / Math.log2(1 + largest)) : 8}%`}})));
  const slider = make("input", {type: "range", min: 0, max: last, value: 0, "aria-label": "pass", on: {input: () => step(+slider.value)}}), said = make("output", {class: "said"}), refused = make("ul", {class: "plain"});
  let at = 0, every = false;
  const whole = make("button", {type: "button", "aria-pressed": "false", on: {click: () => { every = !every; whole.setAttribute("aria-pressed", every); step(at); }}}, "whole graph");
  place.append(make("p", {class: "quiet"}, "One bar a pass: how much it changed. The slider, or [ and ], goes through them; a node that is chosen stays chosen."),
    make("div", {class: "panel"}, make("div", {class: "passes"}, bars), slider, make("p", {class: "bar"}, said, whole), refused));
  const view = new GraphView(graph, place, {});
  function step(to) {
    const chosen = view.selected ? followed(graph, at, to, view.selected) : null;
    at = Math.max(0, Math.min(last, to));
    slider.value = at;
    const frame = graph.frames[at];
    slider.setAttribute("aria-valuetext", frame.name);
    bars.forEach((bar, place) => { if (place === at) bar.setAttribute("aria-current", "step"); else bar.removeAttribute("aria-current"); });
    said.replaceChildren(make("b", {}, frame.name), at ? ` changed ${counted(did[at], "node")}` : ` gave ${counted(graph.entries(0).length, "node")}`);
    view.show(at, every);
    refused.replaceChildren(...groupsOf(frame.refused, ([, what, sentence]) => `${what}: ${sentence.replace(/\d+/g, "")}`).map((alike) => make("li", {class: "refused"}, alike.length > 1 ? make("span", {class: "times"}, `${alike.length} ×`) : "", make("button", {type: "button", class: "plain", title: "shows the node, and what it looked at", on: {click: () => lookedAt(alike[0][0])}}, `${alike[0][1]}: ${alike[0][2]}`))));
    if (chosen) { view.reveal(chosen); view.select(chosen); }
    else if (view.selected) { view.selected = null; view.details.replaceChildren(); view.redraw(); }
  }
  function lookedAt(name) {  // the node of a refusal, and all that it is made of within its module
    const entry = view.byName.get(graph.words[name]);
    if (!entry) return;
    const found = new Set([entry]);
    for (const one of found) for (const input of one.view.inputs) { const from = view.byName.get(input); if (from && from.module === entry.module && found.size < 60) found.add(from); }
    view.reveal(entry);
    view.select(entry, [...found].slice(1));
  }
  place.addEventListener("keydown", (event) => { if (event.key === "[" || event.key === "]") step(at + (event.key === "]" ? 1 : -1)); });
  step(last);
  return {step, view};
}
function followed(graph, from, to, entry) {  // the node that another graph has in its place
  const all = graph.frames.length - 1;
  let number = entry.a >= 0 ? entry.a : entry.b;
  let begin = from === all && all > 0 ? all - 1 : from;
  const end = to === all && all > 0 ? all - 1 : to;
  for (; begin < end; begin++) number = next(graph.entries(begin + 1), number, "b", "a");
  for (; begin > end; begin--) number = next(graph.entries(begin), number, "a", "b");
  const entries = graph.entries(to);
  return entries.find((one) => one.a === number || one.b === number) || null;
  function next(entries, number, here, there) {
    const same = entries.find((one) => one[here] === number || (one.k === 0 && one.b < 0 && one.a === number));
    if (same && same[there] >= 0) return same[there];
    if (same && same.k === 0) return same.a;
    const view = graph.view(number), alike = entries.find((one) => one[there] >= 0 && one[here] < 0 && one.k !== 0 && one.view.module === view.module && one.view.source === view.source);
    return alike ? alike[there] : number;  // made of the same line, in the same module
  }
}

// Predictions for lengths and numbers of ranks: memory and time drawn, all points in a table, one attention on lanes.
const points = data.points, lengths = [...new Set(points.map((point) => point.length))].sort((one, other) => one - other), ranks = [...new Set(points.map((point) => point.world_size))].sort((one, other) => one - other);
const lineColour = (place) => `oklch(var(--light) .14 ${Math.round(255 + 300 * place / Math.max(ranks.length, 1)) % 360})`;
byId("summary").textContent = `${data.training ? "a training step" : "a forward"} per rank, ${data.hardware} over ${data.links}, predicted`;
const longest = data.longest, [widest, farthest] = longest.reduce((one, other) => (other[1] || 0) > (one[1] || 0) ? other : one), last = points.at(-1);
const numberCell = (value, text = value.toLocaleString("en")) => make("td", {class: "number", "data-value": value}, text);
byId("main").append(tiles([
  {label: `memory of ${data.hardware}`, value: bytesText(data.limit)}, {label: `tokens fit on ${counted(widest, "rank")}, at most`, value: farthest ? tokensText(farthest) : "none"},
  ...(last ? [{label: `a step of ${tokensText(last.length)} tokens on ${counted(last.world_size, "rank")}`, value: secondsText(last.seconds)}, {label: "held by a rank in it, at most", value: bytesText(last.memory), share: Math.min(1, last.memory / data.limit), colour: last.fits ? "sharded" : "refused"}, {label: "of its time waits for exchanges", value: percentText(last.exposed / last.seconds), share: last.exposed / last.seconds, colour: "gathered"}] : []),
]));
function chart(label, of, text, limit) {  // a line for each number of ranks; both axes logarithmic
  const W = 560, H = 300, left = 64, bottom = 34, top = 14, right = 12, shown = points.filter((point) => of(point) > 0), values = shown.map(of).concat(limit ? [limit] : []);
  if (!shown.length) return "";
  const base = text === bytesText ? 16 : 10, log = (value) => Math.log(value) / Math.log(base), low = log(Math.min(...values)) - .1, high = log(Math.max(...values)) + .1, first = Math.log2(lengths[0]), last = Math.max(Math.log2(lengths.at(-1)), first + 1e-9);
  const x = (length) => lengths.length === 1 ? (left + W) / 2 : left + 8 + (Math.log2(length) - first) / (last - first) * (W - left - right - 16), y = (value) => top + (high - log(value)) / (high - low) * (H - top - bottom);
  const svg = draw("svg", {class: "chart", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${label} by tokens; the table has the numbers`});
  const step = Math.max(1, Math.ceil((high - low) / 5));
  for (let power = Math.ceil(low); power <= high; power += step) svg.append(draw("line", {class: "grid", x1: left, x2: W - right, y1: y(base ** power), y2: y(base ** power)}), draw("text", {x: left - 8, y: y(base ** power) + 4, "text-anchor": "end"}, text(base ** power)));
  const every = Math.ceil(lengths.length / 8);
  lengths.forEach((length, place) => { if (place % every === 0) svg.append(draw("text", {x: x(length), y: H - bottom + 18, "text-anchor": "middle"}, tokensText(length))); });
  svg.append(draw("text", {x: W - right, y: H - 2, "text-anchor": "end"}, "tokens"));
  if (limit) svg.append(draw("line", {class: "limit", x1: left, x2: W - right, y1: y(limit), y2: y(limit)}), draw("text", {x: left + 4, y: y(limit) - 5, style: "fill:var(--refused)"}, `${data.hardware}: ${text(limit)}`));
  ranks.forEach((count, place) => {
    const own = shown.filter((point) => point.world_size === count);
    svg.append(draw("path", {d: own.map((point, at) => `${at ? "L" : "M"}${x(point.length).toFixed(1)} ${y(of(point)).toFixed(1)}`).join(""), style: `stroke:${lineColour(place)}`}));
    for (const point of own) svg.append(draw("circle", {cx: x(point.length), cy: y(of(point)), r: 4, style: `fill:${lineColour(place)}`}, draw("title", {}, `${tokensText(point.length)} tokens, ${counted(count, "rank")}: ${text(of(point))}`)));
  });
  return make("figure", {class: "panel"}, make("h3", {}, label), svg);
}
section("charts", "By length", "logarithmic").append(make("div", {class: "columns"}, chart("Memory of a rank", (point) => point.memory, bytesText, data.limit), chart("Time of a step", (point) => point.seconds, secondsText), chart("Sent by a rank", (point) => point.bytes, bytesText)), legend(ranks.map((count, place) => [lineColour(place), counted(count, "rank")])));
if (longest.length) {
  const caps = new Set(longest.map(([, , cap]) => cap));
  section("longest", "The longest sequence that fits", caps.size === 1 ? longest[0][2] : "").append(fill(table("longest-table", [{name: "ranks", number: true}, {name: "tokens", number: true}, {name: "of each rank", number: true}, {name: ""}], longest.map(([count, length, cap]) => ({
    cells: [numberCell(count), meter(length || 0, farthest, length ? length.toLocaleString("en") : "none"), length ? numberCell(Math.ceil(length / count)) : make("td", {class: "number"}), caps.size > 1 ? cap : ""],
  }))), {style: "max-width:620px"}, []));
}

// ---- attentions: each with every exchange that was chosen for it, drawn on a few ranks ----
const pointCells = (point) => [numberCell(point.length), numberCell(point.world_size)];
function sitePoints(site) {
  const away = most(site.points.map(([, bytes]) => bytes)), slowest = most(site.points.map(([, , , seconds]) => seconds));
  return make("div", {}, make("h3", {}, "Where it was chosen", make("small", {}, site.times > 1 ? `all ${site.times} together, of a rank` : "of a rank")), table(`site${data.sites.indexOf(site)}`, [{name: "tokens", number: true}, {name: "ranks", number: true}, {name: "sent", number: true}, {name: "FLOP", number: true}, {name: "time", number: true}, {name: "exposed", number: true}], site.points.map(([place, bytes, flops, seconds, exposed]) => ({
    cells: [...pointCells(points[place]), meter(bytes, away, bytesText(bytes), "four"), numberCell(flops, countText(flops)), meter(seconds, slowest, secondsText(seconds), "three"), meter(seconds ? exposed / seconds : 0, 1, percentText(seconds ? exposed / seconds : 0), "gathered")],
  })), {label: `points at which ${named(site.modules)} is exchanged by ${site.strategy}`}));
}
const spanText = (values, text) => { const all = [...new Set(values)]; return all.length === 1 ? text(all[0]) : `${text(Math.min(...all))} to ${text(Math.max(...all))}`; };
if (data.sites.length) section("attentions", counted(sum(new Map(data.sites.map((site) => [named(site.modules), site.times])).values()), "attention"), "once for each exchange that was chosen").append(table("sites", [{name: "module"}, {name: "mask"}, {name: "pattern"}, {name: "strategy"}, {name: "layout"}, {name: "ranks", number: true}, {name: "tokens", number: true}, {name: "points", number: true}], data.sites.map((site) => {
  const at = site.points.map(([place]) => points[place]), words = (value) => make("td", {class: "word"}, value);
  return {
    text: `${site.modules.join(" ")} ${site.pattern} ${site.strategy} ${site.layout}`,
    more: () => make("div", {class: "columns"}, make("div", {}, make("h3", {}, "The mask", make("small", {}, site.which)), maskFigure(site.picture)), sitePoints(site)),
    cells: [make("span", {}, site.times > 1 ? make("span", {class: "times"}, `${site.times} ×`) : "", make("span", {class: "name"}, named(site.modules))), site.picture ? maskSvg(site.picture, true) : "", site.pattern, words(make("span", {class: "tag"}, site.strategy)), words(site.layout),
      numberCell(most(at.map((one) => one.world_size)), spanText(at.map((one) => one.world_size), (value) => value.toLocaleString("en"))), numberCell(most(at.map((one) => one.length)), spanText(at.map((one) => one.length), tokensText)), numberCell(at.length)],
  };
})));
section("points", "All points", "of a rank; a bar is a share: of the memory of a rank, of what is sent, of the time").append(table("points-table", [{name: "tokens", number: true}, {name: "ranks", number: true}, {name: "memory", number: true}, {name: "fits"}, {name: "sent", number: true}, {name: "off node", number: true}, {name: "FLOP", number: true}, {name: "time", number: true}, {name: "exposed", number: true}, {name: "exchange"}], points.map((point) => ({
  cells: [...pointCells(point), meter(Math.min(point.memory, data.limit), data.limit, bytesText(point.memory), point.fits ? "sharded" : "refused"), make("td", {class: "word"}, point.fits ? "yes" : make("span", {class: "tag bad"}, "no")), numberCell(point.bytes, bytesText(point.bytes)), data.network ? meter(point.bytes ? point.between / point.bytes : 0, 1, percentText(point.bytes ? point.between / point.bytes : 0), "four") : "", numberCell(point.flops, countText(point.flops)), numberCell(point.seconds, secondsText(point.seconds)), meter(point.exposed / point.seconds, 1, percentText(point.exposed / point.seconds), "gathered"), point.exchange],
}))));
if (data.attention) new Lanes(section("attention", "The forward of one attention", data.attention.subtitle), data.attention.spans, [{name: "compute", colour: "one"}, {name: "exchange", colour: "two"}], most(data.attention.spans.map((span) => span[4])));
if (data.notes.length) section("notes", "Notes").append(make("ul", {class: "plain"}, data.notes.map((note) => make("li", {class: "row"}, note))));
if (data.formulas.length) section("formulas", "Formulas", "of one attention on the busiest rank; bytes: on rank r").append(table("formulas-table", [{name: "pattern, layout, strategy"}], data.formulas.map(([name, text]) => ({cells: [name], more: () => make("pre", {}, text), text: `${name} ${text}`})), {sorts: false}), make("details", {}, make("summary", {}, "Symbols"), make("ul", {class: "plain"}, data.legend.map((line) => make("li", {}, line)))));

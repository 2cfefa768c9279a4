// Predictions for lengths and numbers of ranks: memory and time drawn, all points in a table, one attention on lanes.
const points = data.points, lengths = [...new Set(points.map((point) => point.length))].sort((one, other) => one - other), ranks = [...new Set(points.map((point) => point.world_size))].sort((one, other) => one - other);
const lineColour = (place) => `oklch(var(--light) .14 ${Math.round(255 + 300 * place / Math.max(ranks.length, 1)) % 360})`;
byId("summary").textContent = `${data.training ? "a training step" : "a forward"} per rank, ${data.hardware} over ${data.links}, predicted`;
const longest = Object.entries(data.longest), farthest = most(longest.map(([, length]) => length));
byId("main").append(tiles([
  {label: `memory of ${data.hardware}`, value: bytesText(data.limit)}, ...longest.slice(-3).map(([count, length]) => ({label: `tokens fit on ${counted(+count, "rank")}, at most`, value: length ? tokensText(length) : "none", share: farthest ? (length || 0) / farthest : 0})),
  points.length && {label: `a step of ${tokensText(points.at(-1).length)} tokens on ${points.at(-1).world_size.toLocaleString("en")}`, value: secondsText(points.at(-1).seconds)},
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
  if (limit) svg.append(draw("line", {class: "limit", x1: left, x2: W - right, y1: y(limit), y2: y(limit)}), draw("text", {x: W - right, y: y(limit) - 5, "text-anchor": "end", style: "fill:var(--refused)"}, `${data.hardware}: ${text(limit)}`));
  ranks.forEach((count, place) => {
    const own = shown.filter((point) => point.world_size === count);
    svg.append(draw("path", {d: own.map((point, at) => `${at ? "L" : "M"}${x(point.length).toFixed(1)} ${y(of(point)).toFixed(1)}`).join(""), style: `stroke:${lineColour(place)}`}));
    for (const point of own) svg.append(draw("circle", {cx: x(point.length), cy: y(of(point)), r: 4, style: `fill:${lineColour(place)}`}, draw("title", {}, `${tokensText(point.length)} tokens, ${counted(count, "rank")}: ${text(of(point))}`)));
  });
  return make("figure", {class: "panel"}, make("h3", {}, label), svg);
}
section("charts", "By length", "logarithmic").append(make("div", {class: "columns"}, chart("Memory of a rank", (point) => point.memory, bytesText, data.limit), chart("Time of a step", (point) => point.seconds, secondsText), chart("Sent by a rank", (point) => point.bytes, bytesText)), legend(ranks.map((count, place) => [lineColour(place), counted(count, "rank")])));
const largest = (of) => most(points.map(of));
section("points", "All points").append(table("points-table", [{name: "tokens", number: true}, {name: "ranks", number: true}, {name: "memory", number: true}, {name: "fits"}, {name: "sent", number: true}, {name: "FLOP", number: true}, {name: "time", number: true}, {name: "exposed", number: true}, {name: "exchange"}], points.map((point) => ({
  cells: [make("td", {class: "number", "data-value": point.length}, point.length.toLocaleString("en")), make("td", {class: "number", "data-value": point.world_size}, point.world_size.toLocaleString("en")), meter(point.memory, Math.max(largest((one) => one.memory), data.limit), bytesText(point.memory), point.fits ? "sharded" : "refused"), make("td", {class: "word"}, point.fits ? "yes" : make("span", {class: "tag bad"}, "no")), meter(point.bytes, largest((one) => one.bytes), point.sent, "four"), meter(point.flops, largest((one) => one.flops), countText(point.flops), "five"), meter(point.seconds, largest((one) => one.seconds), secondsText(point.seconds), "three"), meter(point.exposed / point.seconds, 1, percentText(point.exposed / point.seconds), "gathered"), point.exchange],
}))));
if (longest.length) section("longest", "The longest sequence that fits").append(make("ul", {class: "plain"}, data.fitting.map((text) => make("li", {class: "row"}, text))));
if (data.attention) new Lanes(section("attention", "The forward of one attention", data.attention.subtitle), data.attention.spans, [{name: "compute", colour: "one"}, {name: "exchange", colour: "two"}], most(data.attention.spans.map((span) => span[4])));
if (data.notes.length) section("notes", "Notes").append(make("ul", {class: "plain"}, data.notes.map((note) => make("li", {class: "row"}, note))));
if (data.formulas.length) section("formulas", "Formulas", "of one attention on the busiest rank; bytes: on rank r").append(table("formulas-table", [{name: "pattern, layout, strategy"}], data.formulas.map(([name, text]) => ({cells: [name], more: () => make("pre", {}, text), text: `${name} ${text}`})), {sorts: false}), make("details", {}, make("summary", {}, "Symbols"), make("ul", {class: "plain"}, data.legend.map((line) => make("li", {}, line)))));

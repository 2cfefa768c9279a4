// What the ranks did when: lanes of exchanges and computation, and how much of the exchanges was hidden.
const LANES = [{name: "compute", colour: "one"}, {name: "program", colour: "three"}, {name: "link", colour: "five"}, {name: "exposed", colour: "refused"}];
const laneOf = data.lanes.map((name) => LANES.findIndex((lane) => lane.name === name));
const totals = data.sums, exposed = sum(totals.map((one) => one.exposed)), linked = sum(totals.map((one) => one.link));
byId("summary").textContent = "compute: blocks of attention; program: what else was computed beside an exchange; link: an exchange was under way; exposed: the rank waited, and did nothing else";
byId("main").append(tiles([
  {label: "ranks", value: totals.length.toLocaleString("en")}, {label: "from the first span to the last", value: secondsText(data.end)},
  {label: "of the exchanges was hidden behind computation", value: percentText(linked ? Math.max(0, 1 - exposed / linked) : 1), share: linked ? Math.max(0, 1 - exposed / linked) : 1},
  {label: "waited, in the mean", value: secondsText(exposed / totals.length), share: exposed / totals.length / (data.end || 1), colour: "refused"}, {label: "sent by all ranks", value: bytesText(sum(totals.map((one) => one.bytes)))},
]));
const spanned = data.spans.map(([rank, lane, label, begin, end, bytes, site]) => [rank, laneOf[lane], data.labels[label], begin, end, bytes, data.sites[site]]);
const lanes = new Lanes(section("lanes", "Lanes", counted(spanned.length, "span")), spanned, LANES, data.end);
const names = ["total", "compute", "program", "link", "exposed"];
section("sums", "Sums, by rank").append(table("sums-table", [{name: "rank", number: true}, ...names.map((name) => ({name, number: true})), {name: "hidden", number: true}, {name: "sent", number: true}], totals.map((one) => ({
  cells: [make("td", {class: "number"}, String(one.rank)), ...names.map((name) => meter(one[name], most(totals.map((other) => other[name])), secondsText(one[name]), {compute: "one", program: "three", link: "five", exposed: "refused", total: "plain"}[name])), meter(one.hidden, 1, percentText(one.hidden), "sharded"), meter(one.bytes, most(totals.map((other) => other.bytes)), bytesText(one.bytes), "four")],
}))));
// ---- by attention: what was computed, sent and waited for, over all ranks ----
const seconds = (spans, lane) => sum(spans.filter((span) => LANES[span[1]].name === lane).map((span) => span[4] - span[3])), sited = groupsOf(spanned.filter((span) => span[6]), (span) => span[6]);
if (sited.length) {
  const ways = ["compute", "link", "exposed"], largest = Object.fromEntries(ways.map((lane) => [lane, most(sited.map((spans) => seconds(spans, lane)))])), sentBy = (spans) => sum(spans.map((span) => LANES[span[1]].name === "link" ? span[5] : 0));
  const drawn = make("div", {id: "mask"}), picture = (site) => drawn.replaceChildren(...(data.masks[site] ? [make("h3", {}, "Its mask, and who computes it", make("small", {class: "name"}, site)), maskFigure(data.masks[site])] : []));
  section("sites", "By attention", "all ranks together; a click shows its first exchange, and its mask").append(table("sites-table", [{name: "attention"}, {name: "mask"}, ...ways.map((name) => ({name, number: true})), {name: "sent", number: true}], sited.map((spans) => ({
    cells: [make("button", {type: "button", class: "plain name", on: {click: () => { const own = spans.filter((span) => span[0] === spans[0][0]), first = own.find((span) => LANES[span[1]].name === "link") || own[0], wide = Math.max(first[4] - first[3], data.end * 1e-3); lanes.range(first[3] - 2 * wide, first[4] + 2 * wide); lanes.pick(first); lanes.canvas.scrollIntoView({block: "nearest"}); picture(spans[0][6]); }}}, spans[0][6]), data.masks[spans[0][6]] ? maskSvg(data.masks[spans[0][6]], true) : "", ...ways.map((lane) => meter(seconds(spans, lane), largest[lane], secondsText(seconds(spans, lane)), {compute: "one", link: "five", exposed: "refused"}[lane])), meter(sentBy(spans), most(sited.map(sentBy)), bytesText(sentBy(spans)), "four")],
  }))), drawn);
  picture((sited.find((spans) => data.masks[spans[0][6]]) || sited[0])[0][6]);
}
const waits = spanned.filter((span) => LANES[span[1]].name === "exposed"), groups = groupsOf(waits, (span) => `${span[2]} ${span[6]}`).sort((one, other) => sum(other.map((span) => span[4] - span[3])) - sum(one.map((span) => span[4] - span[3]))).slice(0, 40);
if (groups.length) section("waits", "What was waited for", "the most first; a click shows the longest wait").append(make("div", {class: "tall", tabindex: 0, role: "group", "aria-label": "waits"}, table("waits-table", [{name: "exchange"}, {name: "of"}, {name: "waits", number: true}, {name: "in all", number: true}, {name: "longest", number: true}, {name: "rank of the longest", number: true}], groups.map((group) => {
  const longest = group.reduce((one, other) => other[4] - other[3] > one[4] - one[3] ? other : one), all = sum(group.map((span) => span[4] - span[3]));
  return {cells: [make("button", {type: "button", class: "plain name", on: {click: () => { const wide = longest[4] - longest[3]; lanes.range(longest[3] - 4 * wide, longest[4] + 4 * wide); lanes.pick(longest); lanes.canvas.scrollIntoView({block: "nearest"}); }}}, group[0][2]), make("td", {class: "name"}, group[0][6] || "-"), make("td", {class: "number"}, String(group.length)), meter(all, sum(groups.map((other) => sum(other.map((span) => span[4] - span[3])))), secondsText(all), "refused"), meter(longest[4] - longest[3], 0, secondsText(longest[4] - longest[3])), make("td", {class: "number"}, String(longest[0]))]};
}), {label: "what was waited for"})));

// The mask of an attention in blocks, coloured by the rank that computes each.
const rankOf = (digit) => digit === undefined || digit === "." || digit === "*" ? -1 : parseInt(digit, 36);
const rankColour = (rank, ranks) => `oklch(var(--light) .13 ${Math.round(255 + 360 * rank / Math.max(ranks, 1)) % 360})`;
const ranksIn = (picture) => 1 + most(picture.ranks.flatMap((line) => [...line].map(rankOf)));
const SEEN = {"#": "every pair", "/": "some pairs", "?": "as tensors decide"};
let hatches = 0;
function maskSvg(picture, small) {
  const lines = picture.seen, ranks = ranksIn(picture), hatch = `hatch${hatches++}`;
  const svg = draw("svg", {viewBox: `0 0 ${lines[0].length} ${lines.length}`, class: small ? "mask small" : "mask", role: small ? undefined : "img", "aria-hidden": small ? "true" : undefined, "aria-label": small ? undefined : maskText(picture), "shape-rendering": "crispEdges"});
  svg.append(draw("pattern", {id: hatch, width: .5, height: .5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)"}, draw("line", {x1: 0, y1: 0, x2: 0, y2: .5, stroke: tint("gathered"), "stroke-width": .25})));
  lines.forEach((line, y) => [...line].forEach((cell, x) => {
    if (cell === ".") return;
    const rank = rankOf(picture.ranks[y]?.[x]), step = rankOf(picture.steps[y]?.[x]);
    const box = draw("rect", {x, y, width: 1, height: 1, class: {"#": "full", "/": "partial", "?": "open"}[cell], style: `fill:${rank < 0 ? tint("sharded") : rankColour(rank, ranks)};opacity:${cell === "#" ? 1 : .5}`});
    if (!small) box.append(draw("title", {}, `${SEEN[cell]}${rank < 0 ? "" : `, computed by rank ${rank}`}${step < 0 ? "" : ` in step ${step}`}`));
    svg.append(box);
    if (cell === "?" && !small) svg.append(draw("rect", {x, y, width: 1, height: 1, style: `fill:url(#${hatch});pointer-events:none`}));
  }));
  return svg;
}
function maskText(picture) {
  const cells = picture.seen.join(""), seen = [...cells].filter((cell) => cell !== ".").length;
  return `mask, queries down, keys across: ${percentText(seen / cells.length)} of the blocks are computed`;
}
function maskFigure(picture) {
  if (!picture || !picture.seen.length) return make("p", {class: "quiet"}, "The mask is not drawn: its sizes are open.");
  const ranks = ranksIn(picture), steps = most(picture.steps.flatMap((line) => [...line].map(rankOf))), place = make("div", {});
  const boxes = () => [...place.querySelectorAll("rect[class]")];
  place.append(maskSvg(picture));
  const figure = make("figure", {class: "masked"}, place);
  const held = picture.ranks.join("");
  if (held.includes("*")) figure.append(make("p", {class: "quiet"}, "Every rank computes all blocks, for its own heads."));
  if (ranks > 0 && held && !held.includes("*")) figure.append(legend([...Array(Math.min(ranks, 16)).keys()].map((rank) => [rankColour(rank, ranks), ranks > 16 && rank === 15 ? `… ${ranks - 1}` : `rank ${rank}`])));
  if (steps > 0) {
    const said = make("output", {}, `all ${steps + 1} steps`), cells = [];
    picture.seen.forEach((line, y) => [...line].forEach((cell, x) => { if (cell !== ".") cells.push(rankOf(picture.steps[y]?.[x])); }));
    const slider = make("input", {type: "range", min: 0, max: steps + 1, value: steps + 1, "aria-label": "step of the exchange", on: {input: () => {
      const at = +slider.value, all = at > steps;
      said.textContent = all ? `all ${steps + 1} steps` : `step ${at}: what each rank computes ${at ? `with what came in step ${at - 1}` : "of its own"}`;
      boxes().forEach((box, place) => { box.style.visibility = all || cells[place] === at ? "visible" : "hidden"; });
    }}});
    figure.append(make("label", {class: "quiet"}, said, slider));
  }
  const kinds = [...new Set(picture.seen.join(""))].filter((cell) => SEEN[cell]).map((cell) => ({"#": "solid: every pair", "/": "pale: some", "?": "hatched: as tensors decide"}[cell]));
  figure.append(make("figcaption", {}, `Queries down, keys across. ${kinds.join(", ")}, empty: none.`));
  return figure;
}

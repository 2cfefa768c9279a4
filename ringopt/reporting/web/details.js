// What is known of one node, and the links of the rows that are in view: edges between values, messages between ranks.
Object.assign(GraphView.prototype, {
  detailsOf(entry) {
    const users = this.entries.filter((other) => other.a >= 0 && other.raw[3].includes(entry.raw[0])), named = (names) => make("span", {}, names.map((name, place) => [place ? ", " : "", make("button", {type: "button", class: "plain name", style: "color:var(--focus)", on: {click: () => this.go(name)}}, `%${name}`)]));
    const side = (title, view, colour) => view && make("div", {}, title ? make("h3", {}, title) : "", make("pre", {class: colour}, view.text), facts({shape: view.shape, "bytes of its result": view.result ? bytesText(view.result) : "", device: view.device, placement: view.placement, "bytes sent": view.sent ? bytesText(view.sent) : "", FLOP: view.flops ? countText(view.flops) : "", module: view.module, source: view.source}), view.site ? siteOf(view.site) : "");
    const siteOf = (site) => make("div", {}, facts({pattern: site.pattern, strategy: site.strategy, layout: site.layout, kernel: site.kernel, refused: site.reason}), maskFigure({seen: site.mask, ranks: site.ranks, steps: site.steps}));
    const both = entry.b >= 0 && entry.a >= 0 && entry.b !== entry.a;
    return make("div", {class: "panel"}, make("h3", {}, `%${entry.view.name}`, make("small", {}, `${entry.kind}: ${this.graph.kinds[entry.kind]}`)),
      [["value", entry.error], ["gradient", entry.gradient]].map(([what, error]) => error ? make("p", {class: error.bad ? "warning refused" : ""}, `${what}: off by ${short(error.relative)} of its largest element (max abs ${short(error.largest)})`) : ""),
      this.overlaid ? this.overlaid(entry) : "",
      make("div", {class: "columns"}, both ? [side("before", entry.before, "removed"), side("after", entry.after, "added")] : side("", entry.view, "")),
      entry.aspects.length ? facts(Object.fromEntries(entry.aspects.filter(([name]) => name !== "op" && name !== "arguments").map(([name, before, after]) => [name, `${before} → ${after}`]))) : "",
      facts({reads: entry.view.inputs.length ? named(entry.view.inputs) : "", "read by": users.length ? named(users.slice(0, 40).map((other) => other.view.name)) : ""}));
  },
  drawLinks() {
    const [wide, high] = this.drawn || [0, 0];  // asked for here, the rows that were just made would be laid out twice
    if (!this.linked || this.canvas.hidden || !wide) return;
    const canvas = this.canvas, ratio = devicePixelRatio || 1, ranks = Math.min(this.ranks, 8), gutter = wide * .38;
    if (canvas.width !== wide * ratio || canvas.height !== high * ratio) { canvas.width = wide * ratio; canvas.height = high * ratio; }
    const pen = canvas.getContext("2d"), top = this.box.scrollTop, y = (row) => row * ROW - top + ROW / 2;
    const x = (rank) => gutter + (wide - gutter - 14) * (rank + .5) / ranks;
    const colours = {rule: colourOf("rule"), plain: colourOf("plain"), sharded: colourOf("sharded"), sends: colourOf("four"), focus: colourOf("focus"), near: colourOf("gathered"), quiet: colourOf("quiet"), panel: colourOf("panel")};
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, wide, high);
    pen.strokeStyle = colours.rule;
    pen.beginPath();
    for (let rank = 0; rank < ranks; rank++) { pen.moveTo(x(rank), 0); pen.lineTo(x(rank), high); }
    pen.stroke();
    const first = Math.max(0, Math.floor(top / ROW)), last = Math.min(this.rows.length, first + Math.ceil(high / ROW) + 1), edges = [];
    for (let row = first; row < last; row++) {
      const {item} = this.rows[row];
      if (item instanceof Branch) continue;
      for (const name of item.view.inputs) {
        const from = this.byName.get(name), at = from && from.raw && this.graph.words[from.raw[1]] !== "input" ? this.rowOf.get(from.index) : undefined;
        if (at !== undefined && at !== row) edges.push([at, row, item === this.selected || from === this.selected]);
      }
    }
    for (const [from, to, chosen] of edges.sort((one, other) => one[2] - other[2])) {
      const bend = gutter - 10 - Math.min(gutter - 18, 7 * Math.log2(1 + Math.abs(to - from)) + 4);
      pen.strokeStyle = chosen ? colours.focus : colours.plain;
      pen.globalAlpha = chosen ? 1 : .55;
      pen.lineWidth = chosen ? 2 : 1;
      pen.beginPath();
      pen.moveTo(gutter, y(from));
      pen.bezierCurveTo(bend, y(from), bend, y(to), gutter, y(to));
      pen.stroke();
    }
    pen.globalAlpha = 1;
    pen.lineWidth = 1.5;
    for (let row = first; row < last; row++) this.drawRow(pen, this.rows[row].item, row, y(row), x, ranks, colours);
    pen.fillStyle = colours.panel;
    pen.fillRect(gutter - 4, 0, wide, 15);
    pen.fillStyle = colours.quiet;
    pen.font = "10.5px system-ui";
    pen.textAlign = "center";
    for (let rank = 0; rank < ranks; rank++) pen.fillText(x(1) - x(0) < 42 ? `${rank}` : `rank ${rank}`, x(rank), 11);
  },
  drawRow(pen, item, row, at, x, ranks, colours) {
    if (item instanceof Branch) {
      if (this.open.has(item.path)) return;
      pen.fillStyle = item.sent ? colours.sends : colours.plain;
      pen.globalAlpha = .45;
      for (let rank = 0; rank < ranks; rank++) pen.fillRect(x(rank) - 5, at - 6, 10, 12);
      pen.globalAlpha = 1;
      if (item.sent) messages(pen, at, x, ranks, colours.sends, "ring");
      return;
    }
    const view = item.view, spread = view.placement.startsWith("S("), here = item === this.selected;
    if (view.sent) messages(pen, at, x, ranks, colours.sends, view.op.includes("attention") || view.op.includes("halo") || view.op.includes("scan") ? "ring" : "all");
    for (let rank = 0; rank < ranks; rank++) {
      pen.fillStyle = here ? colours.focus : this.near.has(item.index) ? colours.near : spread ? colours.sharded : colours.plain;
      pen.strokeStyle = pen.fillStyle;
      pen.beginPath();
      if (spread || view.placement === "local") pen.arc(x(rank), at, here ? 5 : 3.5, 0, 7); else pen.rect(x(rank) - 3, at - 3, 6, 6);
      if (view.placement === "local") pen.stroke(); else pen.fill();
    }
  },
});
function messages(pen, at, x, ranks, colour, kind) {  // a ring: from each to the next; all: among all
  pen.strokeStyle = pen.fillStyle = colour;
  pen.beginPath();
  if (kind === "ring") for (let rank = 0; rank < ranks - 1; rank++) { pen.moveTo(x(rank), at); pen.quadraticCurveTo((x(rank) + x(rank + 1)) / 2, at - 11, x(rank + 1), at); }
  else for (let rank = 0; rank < ranks - 1; rank++) { pen.moveTo(x(rank), at - 2); pen.lineTo(x(rank + 1), at + 2); pen.moveTo(x(rank), at + 2); pen.lineTo(x(rank + 1), at - 2); }
  pen.stroke();
  for (let rank = 1; rank < ranks; rank++) { pen.beginPath(); pen.moveTo(x(rank) - 4, at - 1); pen.lineTo(x(rank) - 10, at - 7); pen.lineTo(x(rank) - 11, at + 1); pen.fill(); }
}

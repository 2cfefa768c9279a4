// Spans of ranks on lanes, drawn on a canvas: the wheel and + - zoom, drag and arrows move, a click tells of a span.
// spans: [rank, lane, label, begin, end, bytes, site] in seconds from 0; lanes: [{name, colour}]
class Lanes {
  constructor(place, spans, lanes, end) {
    this.ranks = [...new Set(spans.map((span) => span[0]))].sort((one, other) => one - other);
    Object.assign(this, {lanes, end, from: 0, to: end, hover: null, picked: null});
    this.tracks = this.ranks.map((rank) => lanes.map((_, lane) => spans.filter((span) => span[0] === rank && span[1] === lane).sort((one, other) => one[3] - other[3])));
    this.longest = this.tracks.map((tracks) => tracks.map((track) => most(track.map((span) => span[4] - span[3]))));
    this.shared = sharedBy([...new Set(spans.map((span) => span[6]).filter(Boolean))]);
    this.high = 16;
    this.block = lanes.length * this.high + 14;
    this.over = make("canvas", {class: "over", "aria-hidden": "true"});
    this.canvas = make("canvas", {tabindex: 0, role: "application", "aria-roledescription": "timeline", "aria-label": `${counted(this.ranks.length, "rank")}, ${lanes.map((lane) => lane.name).join(", ")}, ${secondsText(end)}; + and - zoom, left and right move, up and down go from span to span, Page Up and Page Down from lane to lane; what a span is, is said below`, style: `height:${30 + this.ranks.length * this.block}px`});
    this.tip = make("div", {class: "tip", hidden: ""});
    this.said = make("p", {class: "readout quiet", role: "status"}, "Wheel or + and −: zoom. Drag or ← →: move. Click, or ↑ ↓ and Page Up, Page Down: what a span is. 0: all.");
    const button = (text, label, run) => make("button", {type: "button", "aria-label": label, on: {click: run}}, text);
    place.append(make("div", {class: "bar"}, button("+", "zoom in", () => this.zoom(.5)), button("−", "zoom out", () => this.zoom(2)), button("all", "all of it", () => this.range(0, end)), legend(lanes.map((lane) => [lane.colour, lane.name]))),
      make("div", {class: "lanes"}, this.over, this.canvas, this.tip), this.said);
    this.canvas.addEventListener("wheel", (event) => { if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) return; event.preventDefault(); this.zoom(event.deltaY > 0 ? 1.25 : .8, this.time(event)); }, {passive: false});
    this.canvas.addEventListener("pointermove", (event) => this.moved(event));
    this.canvas.addEventListener("pointerleave", () => { this.hover = null; this.tip.hidden = true; this.later(); });
    this.canvas.addEventListener("pointerdown", (event) => { this.drag = {x: event.offsetX, from: this.from, moved: false}; this.canvas.setPointerCapture(event.pointerId); });
    this.canvas.addEventListener("pointerup", (event) => { if (this.drag && !this.drag.moved) this.pick(this.under(event)); this.drag = null; });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.over.addEventListener("pointerdown", (event) => { const wide = (this.to - this.from) / 2, at = event.offsetX / this.over.clientWidth * end; this.range(at - wide, at + wide); });
    new ResizeObserver(() => this.later()).observe(this.canvas);
    repaints.push((now) => now ? this.paint() : this.later());
    this.later();
  }
  get left() { return Math.min(96, this.canvas.clientWidth * .2); }
  x(time) { return this.left + (time - this.from) / (this.to - this.from) * (this.canvas.clientWidth - this.left - 8); }
  time(event) { return this.from + (event.offsetX - this.left) / (this.canvas.clientWidth - this.left - 8) * (this.to - this.from); }
  range(from, to) {
    const wide = Math.min(this.end, Math.max(to - from, this.end * 1e-6));
    this.from = Math.max(0, Math.min(from, this.end - wide));
    this.to = this.from + wide;
    this.later();
  }
  zoom(by, about = (this.from + this.to) / 2) { this.range(about - (about - this.from) * by, about + (this.to - about) * by); }
  key(event) {
    const wide = this.to - this.from, run = {"+": () => this.zoom(.5), "=": () => this.zoom(.5), "-": () => this.zoom(2), 0: () => this.range(0, this.end), ArrowRight: () => this.range(this.from + wide / 5, this.to + wide / 5), ArrowLeft: () => this.range(this.from - wide / 5, this.to - wide / 5), ArrowDown: () => this.walk(1), ArrowUp: () => this.walk(-1), PageDown: () => this.change(1), PageUp: () => this.change(-1)}[event.key];
    if (run) { event.preventDefault(); run(); }
  }
  walk(by) {  // to the next span of a lane, which comes into view
    const track = this.picked ? this.tracks[this.ranks.indexOf(this.picked[0])][this.picked[1]] : this.tracks.flat().find((one) => one.length);
    if (track) this.show(track[Math.max(0, Math.min(track.length - 1, this.picked ? track.indexOf(this.picked) + by : firstFrom(track, this.from)))] || track[0]);
  }
  change(by) {  // to the lane beside it, at the same time
    const tracks = this.tracks.flat().filter((one) => one.length), track = tracks[tracks.findIndex((one) => one.includes(this.picked)) + by];
    if (track) this.show(track[Math.min(track.length - 1, firstFrom(track, this.picked ? this.picked[3] : this.from))]);
  }
  show(span) {
    const wide = this.to - this.from;
    if (span[3] < this.from || span[3] > this.to) this.range(span[3] - wide / 4, span[3] + wide * 3 / 4);
    this.pick(span);
  }
  moved(event) {
    if (this.drag && event.buttons) {
      const by = (event.offsetX - this.drag.x) / (this.canvas.clientWidth - this.left - 8) * (this.to - this.from);
      this.drag.moved ||= Math.abs(event.offsetX - this.drag.x) > 3;
      if (this.drag.moved) this.range(this.drag.from - by, this.drag.from - by + this.to - this.from);
      return;
    }
    this.hover = this.under(event);
    this.tip.hidden = !this.hover;
    if (this.hover) {
      this.tip.textContent = this.text(this.hover);
      this.tip.style.left = `${Math.min(event.offsetX + 12, this.canvas.clientWidth - 220)}px`;
      this.tip.style.top = `${event.offsetY + 54}px`;
    }
    this.later();
  }
  under(event) {
    const rank = Math.floor((event.offsetY - 24) / this.block), lane = Math.floor((event.offsetY - 24 - rank * this.block) / this.high), track = this.tracks[rank]?.[lane];
    if (!track) return null;
    const slack = (this.to - this.from) / this.canvas.clientWidth * 2, at = this.time(event);
    return track.find((span) => span[3] - slack <= at && at <= span[4] + slack) || null;
  }
  text(span) { return `rank ${span[0]}, ${this.lanes[span[1]].name}: ${span[2]}${span[6] ? ` of ${span[6]}` : ""}, ${secondsText(span[4] - span[3])} from ${secondsText(span[3])}${span[5] ? `, ${bytesText(span[5])}` : ""}`; }
  fitting(pen, span, wide) {  // the most of its name that a box has room for
    const all = span[6] ? [`${span[6]}: ${span[2]}`, `${span[6].slice(this.shared)}: ${span[2]}`, span[6].slice(this.shared)] : [span[2]];
    return all.find((text) => pen.measureText(text).width <= wide) || all.at(-1);
  }
  pick(span) { this.picked = span; if (span) this.said.textContent = this.text(span); this.later(); }
  later() { this.waiting ||= requestAnimationFrame(() => { this.waiting = 0; this.paint(); }); }
  pen(canvas) {
    const ratio = devicePixelRatio || 1, wide = canvas.clientWidth, high = canvas.clientHeight;
    if (canvas.width !== Math.round(wide * ratio) || canvas.height !== Math.round(high * ratio)) { canvas.width = Math.round(wide * ratio); canvas.height = Math.round(high * ratio); }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, wide, high);
    return pen;
  }
  paint() {
    if (!this.canvas.clientWidth) return;
    const pen = this.pen(this.canvas), quiet = colourOf("quiet"), rule = colourOf("rule"), ink = colourOf("ink"), colours = this.lanes.map((lane) => colourOf(lane.colour)), wide = this.canvas.clientWidth, high = this.canvas.clientHeight;
    pen.font = "11px system-ui";
    for (const tick of ticksOf(this.from, this.to, wide > 700 ? 9 : 4)) {
      pen.strokeStyle = rule;
      pen.beginPath(); pen.moveTo(this.x(tick), 18); pen.lineTo(this.x(tick), high); pen.stroke();
      pen.fillStyle = quiet; pen.textAlign = "center";
      pen.fillText(secondsText(Math.max(0, Number(tick.toPrecision(12)))), this.x(tick), 12);
    }
    this.tracks.forEach((tracks, place) => {
      const top = 24 + place * this.block;
      pen.textAlign = "left"; pen.fillStyle = ink; pen.font = "600 12px system-ui";
      pen.fillText(`rank ${this.ranks[place]}`, 10, top + this.block / 2 - 2);
      pen.font = "10.5px system-ui";
      tracks.forEach((track, lane) => this.paintTrack(pen, track, top + lane * this.high, colours[lane], this.longest[place][lane]));
    });
    const over = this.pen(this.over), scale = this.over.clientWidth / this.end, each = Math.max(1, (this.over.clientHeight - 6) / this.ranks.length);
    this.tracks.forEach((tracks, place) => tracks.forEach((track, lane) => { over.fillStyle = colours[lane]; over.globalAlpha = lane === 0 ? .5 : lane === tracks.length - 1 ? 1 : .15; let drawn = -1; for (const span of track) { const to = Math.max(span[4] * scale, span[3] * scale + .5); if (to - drawn < .5) continue; over.fillRect(span[3] * scale, 3 + place * each, to - span[3] * scale, Math.max(1, each - 1)); drawn = to; } }));
    over.globalAlpha = 1; over.strokeStyle = colourOf("focus"); over.lineWidth = 2;
    over.strokeRect(this.from * scale + 1, 1, Math.max(4, (this.to - this.from) * scale - 2), this.over.clientHeight - 2);
  }
  paintTrack(pen, track, top, colour, longest) {
    let place = firstFrom(track, this.from - longest), drawn = -1;
    for (; place < track.length && track[place][3] <= this.to; place++) {
      const span = track[place], begin = Math.max(this.left, this.x(span[3])), end = Math.min(this.canvas.clientWidth - 8, this.x(span[4]));
      if (end < this.left || end - drawn < .4) continue;
      drawn = end;
      const box = Math.max(end - begin, .8), chosen = span === this.picked || span === this.hover;
      pen.globalAlpha = chosen ? 1 : .82;
      pen.fillStyle = colour;
      pen.fillRect(begin, top, box, this.high - 3);
      if (chosen) { pen.strokeStyle = colourOf("ink"); pen.lineWidth = 1.5; pen.strokeRect(begin, top, box, this.high - 3); }
      if (box > 46) { pen.globalAlpha = 1; pen.fillStyle = colourOf("panel"); pen.save(); pen.beginPath(); pen.rect(begin, top, box - 3, this.high); pen.clip(); pen.fillText(this.fitting(pen, span, box - 8), begin + 4, top + this.high - 6); pen.restore(); }
    }
    pen.globalAlpha = 1;
  }
}
function sharedBy(names) {  // how long the modules are that all of them begin with
  const parts = names.map((name) => name.split(".")), first = parts[0] || [];
  const differ = first.findIndex((part, at) => at === first.length - 1 || parts.some((other) => other[at] !== part));
  return names.length < 2 ? 0 : first.slice(0, differ).join(".").length + (differ > 0);
}
function firstFrom(track, time) { let low = 0, high = track.length; while (low < high) { const middle = (low + high) >> 1; if (track[middle][3] < time) low = middle + 1; else high = middle; } return low; }
function ticksOf(from, to, many) {
  const least = (to - from) / many, power = 10 ** Math.floor(Math.log10(least)), step = [1, 2, 5, 10].map((times) => times * power).find((one) => one >= least), found = [];
  for (let at = Math.ceil(from / step); at * step <= to; at++) found.push(at * step);
  return found;
}

// Rows of a graph that are made as they come into view, with links between ranks beside them, and details of one node.
const ROW = 26, OVERSCAN = 6, MARKS = {added: "+", removed: "−", replaced: "±", changed: "±", rerouted: "~", resized: "=", same: ""};
class GraphView {
  // options: {metric: entry -> number or null, chosen: entry called when one is selected}
  constructor(graph, place, options = {}) {
    Object.assign(this, {graph, options, open: new Set(), shown: new Set(), rows: [], at: 0, entries: [], selected: null, near: new Set(), wanted: "", metric: null, pool: new Map(), linked: innerWidth > 640});
    this.chips = make("span", {class: "bar"});
    this.space = make("div", {class: "space"});
    this.box = make("div", {class: "view", tabindex: 0, role: "treegrid", "aria-label": "nodes by module; arrow keys move, right and left open and close, Enter shows details", "aria-multiselectable": "false"}, this.space);
    this.canvas = make("canvas", {"aria-hidden": "true"});
    this.links = make("button", {type: "button", class: "tolinks", "aria-pressed": this.linked, on: {click: () => this.link(!this.linked)}}, "links");
    const fold = make("button", {type: "button", on: {click: () => { this.open.clear(); this.flatten(); }}}, "fold all"), unfold = make("button", {type: "button", on: {click: () => this.openAll()}}, "unfold all");
    this.grid = make("div", {class: "graph"}, this.box, this.canvas);
    this.details = make("div", {class: "details", "aria-live": "polite"});
    place.append(make("p", {class: "bar"}, this.chips, fold, unfold, this.links), this.grid, this.details);
    this.box.addEventListener("scroll", () => this.later());
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.space.addEventListener("click", (event) => this.click(event));
    new ResizeObserver(() => this.later()).observe(this.box);
    new ResizeObserver(() => { this.drawn = [this.canvas.clientWidth, this.canvas.clientHeight]; this.later(); }).observe(this.canvas);
    repaints.push((now) => now ? this.paint() : this.later());
    addEventListener("beforeprint", () => { this.printing = true; this.paint(); });  // all rows, at most as many as are legible
    addEventListener("afterprint", () => { this.printing = false; this.paint(); });
    searchers.push((text) => this.search(text));
    this.link(this.linked);
  }
  // ---- what is shown ----
  show(place, every) {  // a frame; `every`: the nodes that nothing happened to as well
    this.place = place;
    this.entries = this.graph.entries(place);
    const counts = {};
    for (const entry of this.entries) counts[entry.kind] = (counts[entry.kind] || 0) + 1;
    const changed = this.graph.kindNames.filter((kind) => !QUIET.has(kind) && counts[kind]);
    this.shown = new Set(every || !changed.length ? this.graph.kindNames : changed);
    this.chips.replaceChildren(...this.graph.kindNames.filter((kind) => counts[kind]).map((kind) => {
      const box = make("input", {type: "checkbox", on: {change: () => { box.checked ? this.shown.add(kind) : this.shown.delete(kind); this.rebuild(); }}});
      box.checked = this.shown.has(kind);
      return make("label", {class: `chip ${kind}`, title: this.graph.kinds[kind]}, box, `${counts[kind].toLocaleString("en")} ${kind}`);
    }));
    this.byName = new Map(this.entries.map((entry) => [this.graph.words[entry.raw[0]], entry]));
    this.ranks = this.graph.ranks || 2;
    this.rebuild();
  }
  rebuild() {
    const matching = this.entries.filter((entry) => this.wanted ? entry.low.includes(this.wanted) : this.shown.has(entry.kind));
    this.tree = treeOf(matching);
    this.matching = matching.length;
    if (!this.begun || this.wanted) this.openSome();
    this.begun = true;
    this.flatten();
  }
  openSome() {  // from the top, as long as it fits on a screen
    let budget = 24 - this.tree.items.length;
    for (let level = this.tree.items, next = []; level.length && budget > 0; level = next, next = [])
      for (const branch of level) if (branch instanceof Branch && branch.items.length <= budget && !(branch.fold && !this.wanted)) {
        this.open.add(branch.path);
        budget -= branch.items.length;
        next.push(...branch.items.filter((item) => item instanceof Branch));
      }
  }
  openAll() {
    const visit = (branch) => { for (const item of branch.items) if (item instanceof Branch) { this.open.add(item.path); visit(item); } };
    visit(this.tree);
    this.flatten();
  }
  flatten() {
    const rows = [], rowOf = new Map();
    const visit = (branch, depth) => {
      for (const item of branch.items) {
        const row = rows.length;
        rows.push({item, depth});
        if (!(item instanceof Branch)) rowOf.set(item.index, row);
        else if (this.open.has(item.path)) visit(item, depth + 1);
        else hide(item, row);
      }
    };
    const hide = (branch, row) => { for (const item of branch.items) if (item instanceof Branch) hide(item, row); else rowOf.set(item.index, row); };
    visit(this.tree, 0);
    Object.assign(this, {rows, rowOf});
    this.at = Math.min(this.at, Math.max(0, rows.length - 1));
    this.space.style.height = `${Math.max(1, rows.length) * ROW}px`;
    this.box.setAttribute("aria-rowcount", rows.length);
    const height = `min(68vh, 760px, ${Math.max(2, rows.length) * ROW + 4}px)`;
    this.box.style.height = height;
    this.canvas.style.height = height;
    for (const line of this.pool.values()) line.remove();
    this.pool.clear();
    this.paint();
  }
  search(text) {
    this.wanted = text;
    if (this.place === undefined) return "";
    this.rebuild();
    return text ? counted(this.matching, "node") : "";
  }
  // ---- rows ----
  later() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.paint(); });
  }
  paint() {
    const high = this.high = this.box.clientHeight || this.high || 0, top = Math.max(0, Math.floor(this.box.scrollTop / ROW) - OVERSCAN);
    const seen = this.printing ? this.rows.length : Math.ceil(high / ROW) + 2 * OVERSCAN;
    const last = Math.min(this.rows.length, top + seen), first = this.printing ? 0 : top;
    for (const [row, line] of this.pool) if (row < first || row >= last) { line.remove(); this.pool.delete(row); }
    const fresh = document.createDocumentFragment();
    for (let row = first; row < last; row++) if (!this.pool.has(row)) { const line = this.line(row); this.pool.set(row, line); fresh.append(line); }
    this.space.append(fresh);
    if (!this.rows.length && !this.pool.size) this.space.replaceChildren(make("p", {class: "quiet", style: "padding:0 12px"}, this.wanted ? "No node has this in its text, module, source or placement." : "No node is of the kinds chosen above.")); else this.space.querySelector("p")?.remove();
    this.drawLinks();
    if (wanted) highlight();
  }
  line(row) {
    const {item, depth} = this.rows[row], isBranch = item instanceof Branch;
    const line = make("div", {class: `line0 ${isBranch ? "module" : item.kind}`, role: "row", id: `${this.box.id || "g"}${this.place}-${row}`, "data-row": row, "aria-level": depth + 1, "aria-rowindex": row + 1, "aria-selected": row === this.at && !isBranch && item === this.selected, vars: {deep: depth}, style: `top:${row * ROW}px;--deep:${depth}`});
    if (isBranch) {
      const counts = Object.entries(item.counts).filter(([kind]) => kind !== "same" || Object.keys(item.counts).length === 1).map(([kind, count]) => `${count.toLocaleString("en")} ${kind}`).join(", ");
      line.setAttribute("aria-expanded", this.open.has(item.path));
      fill(line, {}, [make("span", {class: "text", role: "gridcell"}, make("span", {class: "twist", "aria-hidden": "true"}, "▸"), item.fold ? make("span", {class: "times"}, `${item.fold.length} ×`) : "", make("b", {class: "name"}, item.name), " ", make("span", {class: "kinds"}, counts), item.differs ? make("span", {class: "differs"}, `, ${item.differs}`) : "", item.bad ? make("span", {class: "refused"}, `, ${item.bad} off`) : ""),
        make("span", {class: "col sent", role: "gridcell"}, item.sent ? bytesText(item.sent) : ""), make("span", {class: "col flops", role: "gridcell"}, item.flops ? countText(item.flops) : "")]);
      return line;
    }
    const view = item.view, old = PAIRED.has(item.kind) && item.before.op !== item.after.op ? make("s", {class: "removed"}, item.before.op) : "", value = this.metric ? this.metric(item) : null;
    if (view.placement.startsWith("S(")) line.classList.add("place-S");
    if (this.near.has(item.index)) line.classList.add("near");
    fill(line, {title: view.text}, [value === null || value === undefined ? "" : make("span", {class: "heat", title: short(value), vars: {tint: tint(item.off ? "refused" : "focus"), o: this.heat(value)}}),
      make("span", {class: `sign ${item.kind}`, "aria-label": item.kind}, MARKS[item.kind]), make("span", {class: "text", role: "gridcell"}, old, view.text),
      make("span", {class: "col shape", role: "gridcell"}, view.shape), make("span", {class: "col place", role: "gridcell"}, view.placement === "replicated" ? "" : view.placement),
      make("span", {class: "col sent", role: "gridcell"}, view.sent ? bytesText(view.sent) : ""), make("span", {class: "col flops", role: "gridcell"}, view.flops ? countText(view.flops) : "")]);
    return line;
  }
  redraw() { for (const line of this.pool.values()) line.remove(); this.pool.clear(); this.paint(); }
  heat(value) { return value === 0 ? .12 : Number.isFinite(+value) ? .3 + .7 * Math.min(1, Math.abs(value) / (this.largest || 1)) : 1; }
  // ---- moving about ----
  click(event) {
    const line = event.target.closest("[data-row]");
    if (line) { this.at = +line.dataset.row; this.act(); }
  }
  act() {
    const row = this.rows[this.at];
    if (!row) return;
    if (row.item instanceof Branch) this.toggle(row.item, !this.open.has(row.item.path)); else this.select(row.item);
    this.focusRow();
  }
  toggle(branch, open) {
    if (open) this.open.add(branch.path); else this.open.delete(branch.path);
    this.flatten();
  }
  key(event) {
    const row = this.rows[this.at], page = Math.max(1, Math.floor(this.box.clientHeight / ROW) - 1);
    const steps = {ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: page, PageUp: -page, Home: -this.rows.length, End: this.rows.length};
    if (!row || event.ctrlKey || event.metaKey) return;
    if (steps[event.key]) this.at = Math.max(0, Math.min(this.rows.length - 1, this.at + steps[event.key]));
    else if (event.key === "Enter" || event.key === " ") this.act();
    else if (event.key === "ArrowRight" && row.item instanceof Branch && !this.open.has(row.item.path)) this.toggle(row.item, true);
    else if (event.key === "ArrowLeft" && row.item instanceof Branch && this.open.has(row.item.path)) this.toggle(row.item, false);
    else if (event.key === "ArrowLeft") { while (this.at > 0 && this.rows[this.at].depth >= row.depth && row.depth) this.at--; }
    else return;
    event.preventDefault();
    this.focusRow();
  }
  focusRow() {
    const top = this.at * ROW;
    if (top < this.box.scrollTop) this.box.scrollTop = top; else if (top + ROW > this.box.scrollTop + this.box.clientHeight) this.box.scrollTop = top + ROW - this.box.clientHeight;
    this.paint();
    for (const [row, line] of this.pool) line.setAttribute("aria-selected", row === this.at);
    const line = this.pool.get(this.at);
    if (line) this.box.setAttribute("aria-activedescendant", line.id);
  }
  reveal(entry) {  // opens what it is in
    const find = (branch) => branch.items.some((item) => item === entry || (item instanceof Branch && find(item) && (this.open.add(item.path), true)));
    if (!this.rowOf.has(entry.index)) { this.shown = new Set(this.graph.kindNames); this.wanted = ""; this.tree = treeOf(this.entries); }
    find(this.tree);
    this.flatten();
    this.at = this.rowOf.get(entry.index) ?? 0;
    this.box.scrollTop = Math.max(0, this.at * ROW - this.box.clientHeight / 2);
    this.focusRow();
  }
  select(entry, near) {
    this.selected = entry;
    this.near = new Set((near || entry.view.inputs.map((name) => this.byName.get(name)).filter(Boolean)).map((one) => one.index));
    this.details.replaceChildren(this.detailsOf(entry));
    this.redraw();
    if (this.options.chosen) this.options.chosen(entry);
  }
  go(name) { const entry = this.byName.get(name); if (entry) { this.reveal(entry); this.select(entry); } }
  link(on) {
    this.linked = on;
    this.links.setAttribute("aria-pressed", on);
    this.grid.classList.toggle("linked", on);
    this.canvas.hidden = !on;
    this.later();
  }
}

// A graph beside another, decoded: entries in order, their modules as a tree, layers that are alike folded.
// An entry: {kind, before, after, view, change}. Views are read as they are asked for.
class Graph {
  constructor(source) {
    Object.assign(this, source);  // words, views, sites, frames, kinds
    this.kindNames = Object.keys(source.kinds);
    this.made = new Map();
    this.decoded = new Map();
  }
  view(number) {
    if (number < 0) return null;
    if (!this.made.has(number)) {
      const [name, op, text, inputs, module, source, shape, placement, sent, flops, site, result, device] = this.views[number], word = (one) => this.words[one];
      this.made.set(number, {number, name: word(name), op: word(op), text, inputs: inputs.map(word), module: word(module), source: word(source), shape: word(shape), placement: word(placement), sent, flops, site: site < 0 ? null : this.sites[site], result, device: word(device)});
    }
    return this.made.get(number);
  }
  entries(place) {
    if (this.decoded.has(place)) return this.decoded.get(place);
    const found = [];
    for (const change of this.frames[place].changes) {
      if (Array.isArray(change)) for (let number = change[0]; number < change[0] + change[1]; number++) found.push(new Entry(this, 0, -1, number, null));
      else found.push(new Entry(this, change.k, change.b, change.a, change));
    }
    found.forEach((entry, index) => { entry.index = index; });
    this.decoded.set(place, found);
    return found;
  }
}
class Entry {
  constructor(graph, kind, before, after, change) { this.graph = graph; this.k = kind; this.b = before; this.a = after; this.change = change; }
  get kind() { return this.graph.kindNames[this.k]; }
  get before() { return this.graph.view(this.b); }
  get after() { return this.graph.view(this.a); }
  get view() { return this.graph.view(this.a >= 0 ? this.a : this.b); }
  get raw() { return this.graph.views[this.a >= 0 ? this.a : this.b]; }
  get module() { const raw = this.raw, words = this.graph.words; return words[raw[1]] === "input" ? "(inputs)" : words[raw[4]] || "(no module)"; }
  get aspects() { return (this.change && this.change.s) || []; }
  get error() { return (this.change && this.change.e) || null; }
  get gradient() { return (this.change && this.change.g) || null; }
  get off() { return Boolean((this.error && this.error.bad) || (this.gradient && this.gradient.bad)); }
  get low() { return this.cachedLow ??= [this.before, this.after].filter(Boolean).map((view) => `${view.text} ${view.module} ${view.source} ${view.placement} ${view.shape}`).join(" ").toLowerCase(); }
}
const PAIRED = new Set(["replaced", "changed"]), QUIET = new Set(["same", "resized"]);
class Branch {  // a module, or layers that are alike; `items` are entries and branches in order
  constructor(name, path, depth) { Object.assign(this, {name, path, depth, items: [], children: new Map(), size: 0, counts: {}, sent: 0, flops: 0, bad: 0, fold: null, differs: ""}); }
  add(entry) {
    this.size++;
    this.counts[entry.kind] = (this.counts[entry.kind] || 0) + 1;
    const raw = entry.raw;
    this.sent += raw[8] || 0;
    this.flops += raw[9] || 0;
    this.bad += entry.off ? 1 : 0;
  }
  get signature() {
    return this.cached ??= hashed(this.items.map((item) => item instanceof Branch ? `${/^\d+$/.test(item.name) ? "" : item.name}{${item.signature}}` : signatureOf(item)).join(";"));
  }
}
function signatureOf(entry) {
  const raw = entry.raw, words = entry.graph.words;
  return `${entry.k} ${words[raw[1]]} ${words[raw[6]]} ${words[raw[7]]} ${raw[3].length} ${entry.b >= 0 && entry.a >= 0 ? words[entry.graph.views[entry.b][1]] : ""} ${entry.off}`;
}
function hashed(text) {  // two 32-bit hashes (FNV-1a, and another start)
  let one = 0x811c9dc5, other = 0x9e3779b9;
  for (let at = 0; at < text.length; at++) {
    one = Math.imul(one ^ text.charCodeAt(at), 0x01000193);
    other = Math.imul(other ^ text.charCodeAt(at), 0x85ebca6b);
  }
  return `${(one >>> 0).toString(36)}${(other >>> 0).toString(36)}${text.length}`;
}
function treeOf(entries) {
  const top = new Branch("", "", -1), known = new Map();
  for (const entry of entries) {
    const path = entry.module;
    let line = known.get(path);
    if (!line) {
      line = [top];
      const parts = path.startsWith("(") ? [path] : path.split(".");
      parts.forEach((part, depth) => {
        const above = line[depth];
        if (!above.children.has(part)) {
          const made = new Branch(part, parts.slice(0, depth + 1).join("."), depth);
          above.children.set(part, made);
          above.items.push(made);
        }
        line.push(above.children.get(part));
      });
      known.set(path, line);
    }
    for (const branch of line) branch.add(entry);
    line.at(-1).items.push(entry);
  }
  foldLayers(top);
  return top;
}
function foldLayers(branch) {  // of siblings that are numbered, those that are alike become one
  for (const child of branch.children.values()) foldLayers(child);
  const layers = branch.items.filter((item) => item instanceof Branch && /^\d+$/.test(item.name)), groups = groupsOf(layers, (layer) => layer.signature);
  const large = groups.filter((group) => group.length > 2).sort((one, other) => other.length - one.length);
  for (const group of large) {
    const fold = new Branch(ranges(group.map((layer) => +layer.name)), `${group[0].path} ×`, group[0].depth);
    const others = layers.filter((layer) => !group.includes(layer));
    Object.assign(fold, {fold: group, items: group, differs: group === large[0] && others.length && others.length < group.length ? `${others.length === 1 ? "layer" : "layers"} ${ranges(others.map((layer) => +layer.name))} ${others.length === 1 ? "differs" : "differ"}` : ""});
    for (const layer of group) {
      fold.size += layer.size;
      fold.sent += layer.sent;
      fold.flops += layer.flops;
      fold.bad += layer.bad;
      for (const [kind, count] of Object.entries(layer.counts)) fold.counts[kind] = (fold.counts[kind] || 0) + count;
    }
    branch.items.splice(branch.items.indexOf(group[0]), 0, fold);
    branch.items = branch.items.filter((item) => !group.includes(item));
  }
}

"use strict";
// What all pages share: elements, numbers in units, tables that sort and fold, search, the theme.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id), root = document.documentElement, SVG = "http://www.w3.org/2000/svg";
function fill(element, props, children) {
  for (const [key, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "on") for (const [event, run] of Object.entries(value)) element.addEventListener(event, run);
    else if (key === "vars") for (const [name, number] of Object.entries(value)) element.style.setProperty(`--${name}`, number);
    else element.setAttribute(key, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== undefined && child !== null && child !== ""));
  return element;
}
const make = (tag, props, ...children) => fill(document.createElement(tag), props, children);
const draw = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);
const tint = (colour) => `var(--${colour})`;

// ---- numbers ----
function inUnits(value, base, units) {
  let place = 0;
  for (; Math.abs(value) >= 999.5 && place < units.length - 1; place++) value /= base;
  return `${place === 0 && Number.isInteger(value) ? value : Number(value.toPrecision(3))} ${units[place]}`.trim();
}
const unknown = (value) => value === null || value === undefined;
const bytesText = (value) => unknown(value) ? "?" : inUnits(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
const countText = (value) => unknown(value) ? "?" : inUnits(value, 1000, ["", "k", "M", "G", "T", "P", "E"]);
function secondsText(value) {
  if (!value) return "0 s";
  const [unit, factor] = value >= 1 ? ["s", 1] : value >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
  return `${Number((value * factor).toPrecision(3)).toLocaleString("en", {maximumSignificantDigits: 3})} ${unit}`;
}
const percentText = (share) => share >= 1 ? "100%" : share && share < .001 ? "< 0.1%" : `${Number(Math.min(100 * share, 99.9).toPrecision(share < .1 ? 2 : 3))}%`;
const short = (value) => typeof value === "string" ? value : value === 0 ? "0" : Number.isInteger(value) ? value.toLocaleString("en") : value.toPrecision(3);
const counted = (count, what) => `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;
const tokensText = (n) => n >= 1 << 20 && n % (1 << 14) === 0 ? `${Number((n / (1 << 20)).toPrecision(3))} Mi` : n >= 1024 && n % 64 === 0 ? `${Number((n / 1024).toPrecision(3))} Ki` : n.toLocaleString("en");
const sum = (values) => values.reduce((total, value) => total + (value || 0), 0);
const most = (values) => values.reduce((largest, value) => Math.max(largest, value || 0), 0);

// ---- names that differ in one number: layers.1.attention ... layers.31.attention are layers.1-31.attention ----
function named(names) {
  if (names.length === 1) return names[0];
  const cut = names.map((name) => name.split(/(\d+)/)), first = cut[0];
  const differ = first.map((_, at) => at).filter((at) => cut.some((parts) => parts[at] !== first[at]));
  if (differ.length !== 1 || differ[0] % 2 === 0 || cut.some((parts) => parts.length !== first.length))
    return names.length > 4 ? `${names.slice(0, 3).join(", ")} … ${names.at(-1)}` : names.join(", ");
  return first.map((part, at) => at === differ[0] ? ranges(cut.map((parts) => +parts[at])) : part).join("");
}
function ranges(numbers) {
  const runs = [];
  for (const number of numbers)
    if (runs.length && number === runs.at(-1)[1] + 1) runs.at(-1)[1] = number; else runs.push([number, number]);
  return runs.map(([from, to]) => from === to ? from : `${from}-${to}`).join(",");
}
function groupsOf(items, keyOf) {
  const groups = new Map();
  for (const item of items) {
    const key = keyOf(item);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(item);
  }
  return [...groups.values()];
}

// ---- parts of a page ----
function section(id, title, note) {
  const place = make("section", {id, "aria-labelledby": `${id}-title`}, make("h2", {id: `${id}-title`}, title, note ? [" ", make("small", {}, note)] : ""));
  byId("main").append(place);
  return place;
}
const tiles = (list) => make("div", {class: "tiles"}, list.filter(Boolean).map(({label, value, share, colour}) => make("div", {class: "tile"},
  make("b", {}, value), make("span", {}, label), share === undefined ? "" : make("i", {vars: {share: `${100 * share}%`, tint: tint(colour || "sharded")}}))));
const legend = (entries) => make("p", {class: "bar legend"}, entries.map(([colour, text]) => make("span", {}, make("i", {class: "key", vars: {tint: colour.startsWith("var") || colour.includes("(") ? colour : tint(colour)}}), text)));
function stack(parts, label) {  // [{name, size, colour}]: one bar, with a key
  const all = sum(parts.map((part) => part.size)), shown = parts.filter((part) => part.size);
  return make("figure", {},
    make("div", {class: "stack", role: "img", "aria-label": `${label}: ${shown.map((part) => `${part.name} ${part.text}`).join(", ")}`},
      shown.map((part) => make("i", {title: `${part.name}: ${part.text}`, vars: {w: part.size / all, tint: tint(part.colour)}}))),
    legend(shown.map((part) => [part.colour, `${part.name} ${part.text}${part.count ? "" : ` (${percentText(part.size / all)})`}`])));
}
function meter(value, largest, text, colour) {  // a number with a bar under it
  return make("td", {class: "number", "data-value": unknown(value) ? -1 : value}, text, value && largest ? make("span", {class: "meter", vars: {share: `${100 * value / largest}%`, tint: tint(colour || "sharded")}}) : "");
}
function table(id, columns, rows, options = {}) {
  // columns: [{name, number}]; rows: [{cells: [td or text], more: () => element, key}]. A row with `more` opens.
  const body = make("tbody"), made = rows.map((row) => row.cells.map((cell) => cell instanceof HTMLElement && cell.tagName === "TD" ? cell : make("td", {}, cell)));
  const used = columns.map((_, place) => !rows.length || made.some((cells) => cells[place].querySelector("svg") || !["", "-"].includes(cells[place].textContent)));
  columns = columns.filter((_, place) => used[place]);  // one of dashes says nothing
  for (const [at, row] of rows.entries()) {
    const cells = made[at].filter((_, place) => used[place]);
    const line = make("tr", {class: "row", "data-text": row.text || undefined}, cells);
    body.append(line);
    if (row.more) openable(line, cells[0], row.more, columns.length);
  }
  const heads = columns.map((column, place) => make("th", {class: column.number ? "number" : undefined, scope: "col"},
    options.sorts === false ? column.name : make("button", {type: "button", on: {click: () => sortBy(body, heads, place, column.number)}}, column.name)));
  return make("div", {class: "wide"}, make("table", {id, "aria-label": options.label}, make("thead", {}, make("tr", {}, heads)), body));
}
function openable(line, cell, more, columns) {
  const button = make("button", {type: "button", class: "plain", "aria-expanded": "false"}, make("span", {class: "twist", "aria-hidden": "true"}, "▸"));
  button.append(...cell.childNodes);
  cell.append(button);
  let opened = null;
  button.addEventListener("click", () => {
    const open = button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", open);
    line.classList.toggle("open", open);
    if (open) line.after(opened = opened || make("tr", {class: "more"}, make("td", {colspan: columns}, more()))); else opened.remove();
    highlight();
  });
}
function sortBy(body, heads, place, numbers) {
  const head = heads[place], down = numbers ? head.getAttribute("aria-sort") !== "descending" : head.getAttribute("aria-sort") === "ascending";
  for (const other of heads) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = (line) => numbers ? +(line.cells[place].dataset.value ?? line.cells[place].textContent) : line.cells[place].textContent;
  const lines = [...body.querySelectorAll("tr.row")].map((line) => [line, line.nextElementSibling?.classList.contains("more") ? line.nextElementSibling : null]);
  lines.sort(([one], [other]) => (numbers ? value(one) - value(other) : value(one).localeCompare(value(other), "en", {numeric: true})) * (down ? -1 : 1));
  body.append(...lines.flat().filter(Boolean));
}
const facts = (pairs) => make("dl", {}, Object.entries(pairs).filter(([, value]) => !unknown(value) && value !== "" && value !== "none").map(([key, value]) => [make("dt", {}, key), make("dd", {}, value)]));

// ---- search: rows of tables and lists are hidden, hits are marked; a part of a page may search by itself ----
const searchers = [];
let wanted = "";
function searched() {
  const rows = [...document.querySelectorAll("tr.row, li.row")];
  for (const row of rows) row.hidden = Boolean(wanted) && !(row.dataset.text || row.textContent).toLowerCase().includes(wanted);
  const counts = [wanted ? counted(rows.filter((row) => !row.hidden).length, "line") : "", ...searchers.map((search) => search(wanted))];
  byId("found").textContent = counts.filter(Boolean).join(", ");
  highlight();
}
function highlight() {
  if (!window.CSS?.highlights) return;
  CSS.highlights.delete("hit");
  if (!wanted) return;
  const hits = [], walk = document.createTreeWalker(byId("main"), NodeFilter.SHOW_TEXT);
  for (let text = walk.nextNode(); text && hits.length < 2000; text = walk.nextNode()) {
    const low = text.data.toLowerCase();
    for (let at = low.indexOf(wanted); at >= 0; at = low.indexOf(wanted, at + wanted.length)) {
      const range = new Range();
      range.setStart(text, at);
      range.setEnd(text, at + wanted.length);
      hits.push(range);
    }
  }
  CSS.highlights.set("hit", new Highlight(...hits));
}
byId("search").addEventListener("input", (event) => { wanted = event.target.value.trim().toLowerCase(); searched(); });
function look(text) { byId("search").value = text; byId("search").dispatchEvent(new Event("input")); }

// ---- the theme, kept where the browser keeps anything for files ----
const kept = {get: (key) => { try { return localStorage.getItem(key); } catch { return null; } }, set: (key, value) => { try { localStorage.setItem(key, value); } catch { /* private */ } }};
root.dataset.theme = kept.get("ringopt-theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
const repaints = [];  // what draws on a canvas, in colours of the theme; at once where `now`
byId("theme").addEventListener("click", () => {
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  kept.set("ringopt-theme", root.dataset.theme);
  for (const paint of repaints) paint();
});
const palette = {};  // of each theme: asking for a style in every frame makes the browser lay the page out
function colourOf(name) {
  const known = palette[root.dataset.theme] ??= {};
  return known[name] ??= getComputedStyle(root).getPropertyValue(`--${name}`).trim();
}

// ---- for a screen reader, a table is called as its section is; on paper all is open, in the colours of paper ----
function callTables() {  // at the end of the script: what comes later, the browser may have told already
  for (const one of document.querySelectorAll("section table:not([aria-label])")) one.setAttribute("aria-label", one.closest("section").querySelector("h2").firstChild.textContent);
}
const printing = {theme: "", closed: []};
addEventListener("beforeprint", () => {
  printing.theme = root.dataset.theme;
  root.dataset.theme = "light";
  for (const one of document.querySelectorAll("details:not([open])")) { one.open = true; printing.closed.push(() => { one.open = false; }); }
  for (const one of document.querySelectorAll("tr.row:not([hidden]) > td > button[aria-expanded=false]")) { one.click(); printing.closed.push(() => one.click()); }
  for (const paint of repaints) paint(true);
});
addEventListener("afterprint", () => {
  root.dataset.theme = printing.theme;
  for (const close of printing.closed.splice(0).reverse()) close();
  for (const paint of repaints) paint(true);
});
document.addEventListener("keydown", (event) => {
  const search = byId("search");
  if (event.target === search) {
    if (event.key !== "Escape") return;
    look("");
    search.blur();
  } else if (event.key === "/" && !event.ctrlKey && !event.metaKey && event.target.tagName !== "SELECT") {
    event.preventDefault();
    search.focus();
    search.select();
  }
});

"use strict";
// What all pages share: elements, numbers, tabs, tables of any length, drawings. Nothing is fetched.
const DATA = JSON.parse(document.getElementById("data").textContent);
const HUES = ["#4c7fe0", "#e08a3c", "#3fa66b", "#c75d8f", "#8a6fd1", "#2f9db0", "#b5922e", "#cf5548", "#6f8a3a", "#7d8694"];

function el(tag, props = {}, ...children) {
  const [name, ...classes] = tag.split("."), e = document.createElement(name);
  if (classes.length) e.className = classes.join(" ");
  for (const [k, v] of Object.entries(props)) {
    if (k.startsWith("on")) e.addEventListener(k.slice(2), v);
    else if (k === "style") e.style.cssText = v;
    else if (v !== undefined && v !== null) e.setAttribute(k, v);
  }
  e.append(...children.flat().filter(c => c !== null && c !== undefined && c !== ""));
  return e;
}

// ---- numbers and names
const unit = (v, units, base) => {
  let i = 0;
  while (Math.abs(v) >= base && i < units.length - 1) { v /= base; i++; }
  return (i === 0 && Number.isInteger(v) ? v : v.toPrecision(Math.abs(v) >= 100 ? Math.max(3, String(Math.round(v)).length) : 3)) + " " + units[i];
};
const bytes = v => typeof v === "number" ? unit(v, ["B", "KB", "MB", "GB", "TB"], 1024) : v;
const amount = v => typeof v === "number" ? unit(v, ["", "K", "M", "G", "T"], 1000).trim() : v;
const seconds = s => !s ? "0 s" : s >= 1 ? s.toFixed(2) + " s" : s >= 1e-3 ? (s * 1e3).toPrecision(3) + " ms" : (s * 1e6).toPrecision(3) + " µs";
const percent = v => v === null || v === undefined ? "" : (v * 100).toFixed(v < 0.1 ? 1 : 0) + " %";
const count = v => v.toLocaleString("en-US");
// of an operation's source: its line, the module it was called in, whether it is of the backward pass
const sourceParts = source => { const [line, ...more] = source.split(", in "); return { line, module: more.find(x => x.startsWith("module "))?.slice(7) || "", backward: more.some(x => x.startsWith("the backward")) }; };
const short = line => (line || "").replace(/[^\s"]*\/([^\/\s]+)/g, "$1");

// ---- the page's frame
const tip = el("div.tip");
function showTip(text, event) {
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  tip.textContent = text;
  tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)) + "px";
}
const tile = (value, text) => el("div.tile", {}, el("b", {}, value), el("span", {}, text));

// A page: title, tiles, and views {name: () => element}, made when they are first looked at. Keys 1 to 9, ← and → choose one.
function frame(title, sub, tiles, views) {
  const bar = el("div", { role: "tablist" }), main = el("main", { role: "tabpanel" }), made = {};
  const names = Object.keys(views);
  const open = name => {
    for (const t of bar.children) {
      t.setAttribute("aria-selected", t.dataset.name === name);
      t.tabIndex = t.dataset.name === name ? 0 : -1;
    }
    made[name] = made[name] || views[name]();
    main.replaceChildren(made[name]);
    if (location.protocol !== "about:") history.replaceState(null, "", "#" + encodeURIComponent(name));
    dispatchEvent(new Event("shown"));
  };
  names.forEach((name, i) => {
    const t = el("button", { role: "tab", title: "key " + (i + 1), onclick: () => open(name) }, name);
    t.dataset.name = name;
    bar.append(t);
  });
  addEventListener("keydown", e => {
    if (/INPUT|SELECT|TEXTAREA/.test(e.target.tagName) || e.ctrlKey || e.metaKey || e.altKey) return;
    const n = Number(e.key);
    if (n >= 1 && n <= names.length) { open(names[n - 1]); bar.children[n - 1].focus(); }
    else if (e.target.role === "tab" || e.target.getAttribute?.("role") === "tab") {
      const at = names.indexOf(e.target.dataset.name) + (e.key === "ArrowRight") - (e.key === "ArrowLeft");
      if (e.key.startsWith("Arrow") && names[at]) { open(names[at]); bar.children[at].focus(); }
    } else if (e.key === "/") { const s = main.querySelector("input[type=search]"); if (s) { s.focus(); e.preventDefault(); } }
  });
  document.body.append(el("header", {}, el("h1", {}, title), el("div.soft", {}, sub), el("div.tiles", {}, tiles), bar), main, tip);
  const wanted = decodeURIComponent(location.hash.slice(1));
  open(names.includes(wanted) ? wanted : names[0]);
  return open;
}

// ---- tables: only the rows in sight exist. columns: {name, width, get(row), show(row), num, bar(row), mono}
function table(columns, rows, { height = 420, pick = null, sort = null, tree = false } = {}) {
  const H = 25, head = el("div.head", { role: "row" }), body = el("div", { style: "position:relative", role: "presentation" });
  const box = el("div.grid", { style: `max-height:${height}px`, tabindex: "0", role: "grid", "aria-rowcount": rows.length }, head, body);
  let shown = rows, at = -1, order = sort ? { column: columns.find(c => c.name === sort.replace("-", "")), down: sort[0] === "-" } : null, width = c => (c.width || 90) + "px";
  const arrange = () => {
    if (!order || tree) return;
    const f = order.column.get || order.column.show, sign = order.down ? -1 : 1;
    shown = [...shown].sort((a, b) => { const x = f(a), y = f(b); return sign * (x < y ? -1 : x > y ? 1 : 0); });
  };
  for (const c of columns) head.append(el("button" + (c.num ? ".num" : ""), { style: `width:${width(c)}`, tabindex: "-1", title: "sort by " + c.name, onclick: () => {
    if (tree) return;
    order = { column: c, down: order && order.column === c ? !order.down : !!c.num };
    arrange(); draw();
  } }, c.name));
  const draw = () => {
    body.style.height = shown.length * H + "px";
    const first = Math.max(0, Math.floor((box.scrollTop - 30) / H) - 4), last = Math.min(shown.length, first + Math.ceil((box.clientHeight || height) / H) + 10), made = [];
    for (let i = first; i < last; i++) {
      const row = shown[i], line = el("div.row" + (i === at ? ".on" : ""), { style: `top:${i * H}px`, role: "row", "aria-selected": i === at, onclick: () => choose(i) });
      for (const c of columns) {
        const value = c.show ? c.show(row) : c.get(row), cell = el("div.cell" + (c.num ? ".num" : "") + (c.mono ? ".mono" : ""), { style: `width:${width(c)}`, role: "gridcell" }, value instanceof Node ? value : String(value ?? ""));
        if (!(value instanceof Node)) cell.title = c.title ? c.title(row) : String(value ?? "");
        if (c.bar) { const share = Math.min(1, c.bar(row) || 0); if (share > 0.002) cell.append(el("span.bar", { style: `width:calc(${share * 100}% - 8px)` })); }
        line.append(cell);
      }
      made.push(line);
    }
    body.replaceChildren(...made);
  };
  const choose = (i, quiet) => {
    at = Math.max(0, Math.min(i, shown.length - 1));
    if (!shown.length) return;
    const top = at * H;
    if (top < box.scrollTop) box.scrollTop = top;
    if (top + H + 32 > box.scrollTop + box.clientHeight) box.scrollTop = top + H + 32 - box.clientHeight;
    draw();
    if (pick && !quiet) pick(shown[at], box);
  };
  box.addEventListener("scroll", () => requestAnimationFrame(draw), { passive: true });
  box.addEventListener("keydown", e => {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 12, PageUp: -12, Home: -1e9, End: 1e9 }[e.key];
    if (step) { choose(at + step); e.preventDefault(); }
    else if (box.keys) box.keys(e, shown[at]);
  });
  box.set = (next, keep) => { const was = keep && shown[at]; shown = next; arrange(); at = was ? shown.indexOf(was) : -1; draw(); };
  box.choose = choose;
  box.show = row => { const i = shown.indexOf(row); if (i >= 0) choose(i, true); };
  box.redraw = draw;
  addEventListener("shown", () => box.isConnected && draw());
  addEventListener("resize", () => box.isConnected && draw());
  arrange();
  requestAnimationFrame(draw);
  return box;
}

// A table with a box to search it; find(row) -> the text that is searched.
function searched(columns, rows, find, options = {}) {
  const grid = table(columns, rows, options), note = el("span.soft", {}, `${count(rows.length)} rows`);
  const box = el("input", { type: "search", placeholder: "filter ( / )", "aria-label": "filter", oninput: () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    const left = rows.filter(r => { const t = find(r).toLowerCase(); return words.every(w => t.includes(w)); });
    note.textContent = `${count(left.length)} of ${count(rows.length)} rows`;
    grid.set(left);
  } });
  return el("div", {}, el("div.tools", {}, box, note, options.more || ""), grid);
}

// ---- drawings: paint(context, width, height, color) again on every change of size or colours
function drawing(height, paint, label) {
  const c = el("canvas", { style: `height:${height}px`, role: "img", "aria-label": label || "" });
  const color = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  c.draw = () => {
    const w = c.clientWidth, h = c.clientHeight, scale = devicePixelRatio || 1;
    if (!w || !c.isConnected) return;
    c.width = w * scale; c.height = h * scale;
    const g = c.getContext("2d");
    g.scale(scale, scale);
    g.font = "11px system-ui, 'Liberation Sans', 'DejaVu Sans', sans-serif";
    paint(g, w, h, color);
  };
  const later = () => requestAnimationFrame(c.draw);
  addEventListener("resize", later);
  addEventListener("shown", later);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);
  later();
  return c;
}
const at = (canvas, e) => { const r = canvas.getBoundingClientRect(); return [e.clientX - r.left, e.clientY - r.top]; };
function fit(g, text, width) {
  if (width < 14) return "";
  if (g.measureText(text).width <= width) return text;
  let n = Math.max(1, Math.floor(text.length * width / g.measureText(text).width) - 1);
  return n < 2 ? "" : text.slice(0, n) + "…";
}
function ticks(low, high, n) {
  const raw = (high - low) / n, power = 10 ** Math.floor(Math.log10(raw || 1)), step = [1, 2, 5, 10].find(f => f * power >= raw) * power, out = [];
  for (let v = Math.ceil(low / step) * step; v <= high; v += step) out.push(v);
  return out;
}
const sum = (rows, f) => rows.reduce((a, r) => a + f(r), 0);
function grouped(rows, key) {
  const found = new Map();
  for (const r of rows) { const k = key(r); found.has(k) ? found.get(k).push(r) : found.set(k, [r]); }
  return found;
}

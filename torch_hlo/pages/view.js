// A program: its graph by Python module and line, what each pass changed, fusions, memory, machine code beside HLO.
{
  const SIZE = { pred: 1, s4: 0.5, u4: 0.5, s8: 1, u8: 1, s16: 2, u16: 2, f16: 2, bf16: 2, s32: 4, u32: 4, f32: 4, s64: 8, u64: 8, f64: 8, c64: 8, c128: 16 };
  const shapeBytes = s => { let n = 0; for (const [, t, d] of s.matchAll(/\b([a-z]+\d*\w*)\[([^\]]*)\]/g)) { const size = d ? d.split(",").reduce((a, v) => a * (Number(v) || NaN), 1) : 1; n += (SIZE[t] || 1) * size; } return Number.isNaN(n) ? 0 : n; };

  // ---- HLO text -> computations of instructions
  const closing = (s, i) => { let depth = 0; for (; i < s.length; i++) { if (s[i] === "(") depth++; else if (s[i] === ")" && !--depth) return i; } return s.length; };
  // programs of JAX and others have the names of their scopes in place of modules
  const placed = (source, meta) => { const parts = sourceParts(source), scopes = meta.match(/op_name="([^"]*)\/[^"\/]*"/); return { ...parts, module: parts.module || (scopes ? scopes[1] : "") }; };
  function parse(text) {
    const found = new Map();
    let current = null, entry = null;
    for (const line of text.split("\n")) {
      const head = line.match(/^(ENTRY )?%([^\s(]+) \(.*\{$/);
      if (head) { current = { name: head[2], rows: [], lines: [line] }; found.set(head[2], current); if (head[1]) entry = current; continue; }
      if (!current) continue;
      current.lines.push(line);
      if (line === "}") { current = null; continue; }
      const m = line.match(/^  (ROOT )?%(\S+) = /);
      if (!m) continue;
      let rest = line.slice(m[0].length), cut = rest[0] === "(" ? closing(rest, 0) + 1 : rest.indexOf(" ");
      const shape = rest.slice(0, cut);
      rest = rest.slice(cut).trimStart();
      const open = rest.indexOf("("), end = closing(rest, open), args = rest.slice(open + 1, end), attrs = rest.slice(end + 1);
      const op = rest.slice(0, open), meta = attrs.match(/metadata=\{([^}]*)\}/)?.[1] || "", file = meta.match(/source_file="([^"]*)"/)?.[1] || "", number = meta.match(/source_line=(\d+)/)?.[1];
      const source = file + (number ? ":" + number : "");
      current.rows.push({ name: m[2], root: !!m[1], shape, op, operands: op === "constant" ? [] : [...args.matchAll(/%([^\s,()]+)/g)].map(x => x[1]), attrs, text: line.trim(), opName: meta.match(/op_name="([^"]*)"/)?.[1] || "",
        source, ...placed(source, meta), calls: [...attrs.matchAll(/(?:calls|to_apply|body|condition|branch_computations)=\{?(%[^\s,}]+(?:, %[^\s,}]+)*)/g)].flatMap(x => x[1].split(", ").map(y => y.slice(1))), bytes: shapeBytes(shape), index: current.rows.length });
    }
    return { computations: found, entry: entry || [...found.values()].pop() };
  }

  // ---- text without numbers in names, so that renumbering is no difference
  const bare = line => line.replace(/%([A-Za-z_][\w-]*?)(\.\d+)+\b/g, "%$1").replace(/, metadata=\{[^}]*\}/, "");
  function difference(a, b) { // [kind, line]: Myers on lines; where too much differs, between lines that both have once
    const x = a.map(bare), y = b.map(bare), out = [];
    const same = (n, to) => { for (; n < to; n++) out.push([" ", b[n]]); };
    const all = (i, n, j, m) => { for (; i < n; i++) out.push(["-", a[i]]); for (; j < m; j++) out.push(["+", b[j]]); };
    const shortest = (low, n, at, m) => { // null where it takes more than so many edits
      const most = Math.min(n + m, 1200), v = new Int32Array(2 * most + 3), trace = [], mid = most + 1;
      for (let d = 0; d <= most; d++) {
        trace.push(v.slice(mid - d - 1, mid + d + 2));
        for (let k = -d; k <= d; k += 2) {
          let i = k === -d || (k !== d && v[mid + k - 1] < v[mid + k + 1]) ? v[mid + k + 1] : v[mid + k - 1] + 1;
          while (i < n && i - k < m && x[low + i] === y[at + i - k]) i++;
          v[mid + k] = i;
          if (i < n || i - k < m) continue;
          const found = [];
          let p = n, q = m;
          for (let e = d; e >= 0; e--) {
            const w = trace[e], k = p - q, of = j => w[j + e + 1], prev = k === -e || (k !== e && of(k - 1) < of(k + 1)) ? k + 1 : k - 1, pp = e ? of(prev) : 0, pq = e ? pp - prev : 0;
            while (p > pp && q > pq) { p--; q--; found.push([" ", b[at + q]]); }
            if (e) { if (p > pp) { p--; found.push(["-", a[low + p]]); } else { q--; found.push(["+", b[at + q]]); } }
          }
          return found.reverse();
        }
      }
      return null;
    };
    const between = (i, n, j, m) => {
      let first = j, last = m;
      while (i < n && j < m && x[i] === y[j]) { i++; j++; }
      while (n > i && m > j && x[n - 1] === y[m - 1]) { n--; m--; }
      same(first, j);
      const found = i < n && j < m ? shortest(i, n - i, j, m - j) : null;
      if (found) for (const f of found) out.push(f);
      else {
        const seen = new Map(), note = (text, side, at) => { const s = seen.get(text) || [0, 0, 0, 0]; s[side]++; s[side + 2] = at; seen.set(text, s); };
        for (let k = i; k < n; k++) note(x[k], 0, k);
        for (let k = j; k < m; k++) note(y[k], 1, k);
        const once = [...seen.values()].filter(s => s[0] === 1 && s[1] === 1).sort((p, q) => p[2] - q[2]), piles = [], back = new Map();
        for (const s of once) { // the longest run that rises in both
          let low = 0, high = piles.length;
          while (low < high) { const c = (low + high) >> 1; piles[c][3] < s[3] ? low = c + 1 : high = c; }
          back.set(s, piles[low - 1]); piles[low] = s;
        }
        const anchors = [];
        for (let s = piles[piles.length - 1]; s; s = back.get(s)) anchors.push(s);
        if (!anchors.length) all(i, n, j, m);
        else {
          for (const [, , p, q] of anchors.reverse()) { between(i, p, j, q); same(q, q + 1); i = p + 1; j = q + 1; }
          between(i, n, j, m);
        }
      }
      same(m, last);
    };
    between(0, x.length, 0, y.length);
    return out;
  }

  function show(P) {
    const stages = P.passes.map(([name, text]) => ({ name, text, lines: text.split("\n") })), final = parse(stages[stages.length - 1].text);
    const rows = final.entry.rows, byName = new Map(rows.map(r => [r.name, r])), users = new Map(rows.map(r => [r.name, []]));
    for (const r of rows) for (const o of r.operands) users.get(o)?.push(r.name);
    P.steps.forEach(([i, moved, flops, matrix, functions], at) => { const r = rows[i]; if (r) Object.assign(r, { moved, flops, matrix, functions, at }); });
    const inside = r => { const seen = new Set(), stack = [...r.calls], out = []; while (stack.length) { const c = final.computations.get(stack.pop()); if (c && !seen.has(c)) { seen.add(c); out.push(c); for (const x of c.rows) stack.push(...x.calls); } } return out; };
    const content = r => { const c = grouped(inside(r).flatMap(c => c.rows).filter(x => !["parameter", "constant", "tuple", "broadcast"].includes(x.op)), x => x.op); return [...c].map(([op, l]) => l.length > 1 ? `${l.length} ${op}` : op).join(", "); };
    const buffers = (P.buffers || "").split("\n").map(l => l.match(/^\s+(\S+(?: \d+)?)\s+(\S+)\s+\[\s*(-?\d+),\s*(\d+)\]\s+(.*)$/)).filter(Boolean).map(m => ({ slot: m[1], bytes: Number(m[2]) || 0, start: Number(m[3]), end: Number(m[4]), names: m[5], offset: m[1].startsWith("arena+") ? Number(m[1].slice(6)) : NaN }));

    // ---- code of functions
    const functions = new Map();
    const code = text => text || "";
    for (const m of code(P.llvm).matchAll(/^define [^\n]*?@([\w.$]+)\([\s\S]*?^\}/gm)) functions.set(m[1], { llvm: m[0], asm: "" });
    { let name = null, start = 0; const t = code(P.asm);
      for (const m of t.matchAll(/^([A-Za-z_][\w.$]*):/gm)) { if (m[1].startsWith(".L")) continue; if (functions.has(name)) functions.get(name).asm = t.slice(start, m.index); name = m[1]; start = m.index; }
      if (functions.has(name)) functions.get(name).asm = t.slice(start); }
    const reach = names => { const out = [], stack = [...names].reverse(), seen = new Set(); while (stack.length) { const f = stack.pop(); if (seen.has(f) || !functions.has(f)) continue; seen.add(f); out.push(f); for (const m of functions.get(f).llvm.matchAll(/@([\w.$]+)/g)) stack.push(m[1]); } return out; };

    const describe = r => [r.text, "", ...(r.at !== undefined ? [`step ${r.at}: ${bytes(r.moved)} moved, ${amount(r.flops)} operations, ${amount(r.matrix)} in products`] : []),
      ...(r.source ? [`from ${r.source}`] : []), ...buffers.filter(b => b.start === r.at || b.names.includes(r.shape) && b.names.startsWith(r.op) && b.start === r.at).map(b => `memory: ${b.slot}, ${bytes(b.bytes)}, steps ${b.start} to ${b.end}`),
      ...inside(r).flatMap(c => ["", ...c.lines])].join("\n");
    const layout = s => [...s.matchAll(/\[([^\]]*)\]/g)].map(([, d]) => `{${d ? d.split(",").map((_, i) => i).reverse().join(",") : ""}}`).join(" ");
    let chosen = null;

    const graph = () => {
      const open = new Set(), tree = [], detail = el("pre.card.detail", { style: "max-height:300px;overflow:auto", "aria-live": "polite" }, "Choose a row. → opens a group, ← closes it, Enter goes to it in the picture.");
      const groups = [...grouped(rows.filter(r => r.op !== "parameter" || users.get(r.name).length), r => r.op === "parameter" ? "inputs" : r.module || (r.backward ? "backward pass" : r.line ? "outside of modules" : "no source"))];
      const many = rows.length > 300;
      groups.sort((a, b) => (a[0] === "inputs") - (b[0] === "inputs"));
      groups.forEach(([m]) => many || m === "inputs" || open.add(m));
      const build = () => {
        tree.length = 0;
        for (const [m, list] of groups) {
          tree.push({ key: m, level: 0, label: m, list });
          if (!open.has(m)) continue;
          for (const [line, part] of grouped(list, r => r.line + (r.backward ? " ←" : ""))) {
            const key = m + "\0" + line;
            if (line) tree.push({ key, level: 1, label: line, list: part });
            if (!line || open.has(key) || part.length === 1 && !many) for (const r of part) tree.push({ key: r.name, level: line ? 2 : 1, r, list: [r] });
          }
        }
        return [...tree];
      };
      const unit = () => { const of = new Map(); for (const t of tree) for (const r of t.list) of.set(r.name, t); return of; }; // the innermost that is shown
      const arrow = t => t.r ? "" : open.has(t.key) ? "▾ " : "▸ ";
      const total = (t, f) => sum(t.list, r => Number(r[f]) || 0), all = Math.max(sum(rows, r => Number(r.moved) || 0), 1);
      const grid = table([
        { name: "module, line, instruction", width: 330, mono: true, show: t => "\u00a0".repeat(t.level * 3) + arrow(t) + (t.r ? "%" + t.r.name : t.level ? short(t.label) : t.label), title: t => t.r ? t.r.text : t.label },
        { name: "count", width: 55, num: true, show: t => t.r ? "" : t.list.length },
        { name: "moved", width: 80, num: true, show: t => { const v = total(t, "moved"); return v ? bytes(v) : ""; }, bar: t => total(t, "moved") / all },
        { name: "flops", width: 70, num: true, show: t => { const v = total(t, "flops") + total(t, "matrix"); return v ? amount(v) : ""; } },
        { name: "shape", width: 170, mono: true, show: t => t.r ? t.r.shape : "" },
        { name: "what", width: 260, mono: true, show: t => t.r ? t.r.calls.length ? content(t.r) : t.r.op : [...grouped(t.list, r => r.op)].map(([o, l]) => `${l.length} ${o}`).join(", ") },
      ], build(), { height: 560, tree: true, pick: t => { chosen = t; detail.textContent = t.r ? describe(t.r) : `${t.label}\n${t.list.length} instructions\n\n` + t.list.slice(0, 60).map(r => r.text).join("\n"); picture.draw(); } });
      const toggle = (t, on) => { if (t && !t.r && open.has(t.key) !== on) { on ? open.add(t.key) : open.delete(t.key); const key = t.key; grid.set(build()); chosen = tree.find(x => x.key === key); grid.show(chosen); } };
      grid.keys = (e, t) => { if (e.key === "ArrowRight") toggle(t, true); else if (e.key === "ArrowLeft") toggle(t, false); else if (e.key === "Enter") picture.focus(); else return; e.preventDefault(); };
      grid.addEventListener("dblclick", () => chosen && toggle(chosen, !open.has(chosen.key)));
      let boxes = [];
      const picture = drawing(560, (g, w, h, c) => {
        boxes = [];
        const t = chosen && tree.find(x => x.key === chosen.key) || tree[0];
        if (!t) return;
        const of = unit();
        for (const r of t.list) of.set(r.name, t);
        const next = (list, way) => { const found = new Map(); for (const x of list) for (const r of x.list) for (const o of way(r)) { const u = of.get(o); if (u && u !== t && !list.includes(u)) found.set(u, (found.get(u) || 0) + (byName.get(o)?.bytes || 0)); } return [...found.keys()]; };
        const before = r => r.operands, after = r => users.get(r.name), l1 = next([t], before), r1 = next([t], after), l2 = next(l1, before).filter(u => !l1.includes(u) && !r1.includes(u)), r2 = next(r1, after).filter(u => !l1.includes(u) && !r1.includes(u) && !l2.includes(u));
        const columns = [l2, l1, [t], r1, r2], wide = Math.min(190, (w - 40) / 5 - 14), place = new Map();
        columns.forEach((list, i) => { const fits = Math.floor(h / 46), part = list.slice(0, fits); part.forEach((u, j) => place.set(u, [8 + i * (w - wide - 16) / 4, h / 2 + (j - (part.length - 1) / 2) * 46 - 17])); if (list.length > fits) { g.fillStyle = c("soft"); g.fillText(`and ${list.length - fits} more`, 8 + i * (w - wide - 16) / 4, h - 2); } });
        g.strokeStyle = c("soft"); g.lineWidth = 1;
        for (const [u, [x, y]] of place) for (const v of new Set(u.list.flatMap(after).map(n => of.get(n)))) { const to = place.get(v); if (!to || v === u || to[0] <= x) continue; g.globalAlpha = u === t || v === t ? 0.9 : 0.35; g.beginPath(); g.moveTo(x + wide, y + 17); g.bezierCurveTo(x + wide + 24, y + 17, to[0] - 24, to[1] + 17, to[0], to[1] + 17); g.stroke(); }
        g.globalAlpha = 1;
        for (const [u, [x, y]] of place) {
          const hue = u.r ? { fusion: HUES[0], dot: HUES[1], convolution: HUES[1], parameter: HUES[9], reduce: HUES[2] }[u.r.op] || HUES[5] : HUES[4];
          g.fillStyle = c("card"); g.fillRect(x, y, wide, 34); g.fillStyle = hue; g.globalAlpha = 0.16; g.fillRect(x, y, wide, 34); g.globalAlpha = 1; g.fillRect(x, y, 3, 34);
          if (u === t) { g.strokeStyle = c("accent"); g.lineWidth = 2; g.strokeRect(x, y, wide, 34); }
          g.fillStyle = c("ink"); g.fillText(fit(g, u.r ? u.r.name : u.level ? short(u.label) : u.label, wide - 12), x + 8, y + 14);
          g.fillStyle = c("soft"); g.fillText(fit(g, u.r ? u.r.shape : `${u.list.length} instructions`, wide - 12), x + 8, y + 28);
          boxes.push([x, y, wide, u]);
        }
      }, "what the chosen row reads, and who reads it");
      picture.tabIndex = 0;
      const under = e => { const [px, py] = at(picture, e); return boxes.find(([x, y, wide]) => px >= x && px <= x + wide && py >= y && py <= y + 34)?.[3]; };
      const go = u => { if (!u) return; chosen = u; grid.show(u); detail.textContent = u.r ? describe(u.r) : `${u.label}\n${u.list.length} instructions`; picture.draw(); };
      picture.addEventListener("click", e => go(under(e)));
      picture.addEventListener("dblclick", e => { const u = under(e); if (u) toggle(u, !open.has(u.key)); picture.draw(); });
      picture.addEventListener("mousemove", e => { const u = under(e); showTip(u ? u.r ? u.r.text + (u.r.source ? "\n" + u.r.source : "") : u.label : "", e); });
      picture.addEventListener("mouseleave", () => showTip(""));
      picture.addEventListener("keydown", e => { const w = picture.clientWidth, here = boxes.find(b => chosen && b[3].key === chosen.key) || boxes[Math.floor(boxes.length / 2)]; if (!here) return; const side = { ArrowLeft: -1, ArrowRight: 1 }[e.key], step = { ArrowUp: -1, ArrowDown: 1 }[e.key]; let to = null;
        if (side) to = boxes.filter(b => side * (b[0] - here[0]) > 20).sort((a, b) => Math.abs(a[0] - here[0]) - Math.abs(b[0] - here[0]) || Math.abs(a[1] - here[1]) - Math.abs(b[1] - here[1]))[0];
        else if (step) { const list = tree, i = list.findIndex(t => t.key === here[3].key); to = [0, 0, 0, list[i + step]]; } else return; if (to) go(to[3]); e.preventDefault(); });
      const find = el("input", { type: "search", placeholder: "find ( / ), Enter for the next", "aria-label": "find an instruction", onkeydown: e => {
        if (e.key !== "Enter" || !find.value) return;
        const words = find.value.toLowerCase(), from = chosen?.r ? chosen.r.index + 1 : 0, r = [...rows.slice(from), ...rows.slice(0, from)].find(r => r.text.toLowerCase().includes(words));
        if (!r) return;
        const [m] = groups.find(([, list]) => list.includes(r)) || [];
        open.add(m); open.add(m + "\0" + r.line + (r.backward ? " ←" : ""));
        grid.set(build()); go(tree.find(t => t.r === r));
      } });
      return el("div", {}, el("div.tools", {}, find, el("span.soft", {}, `${count(rows.length)} instructions after all passes; → and ← open and close groups`)), el("div.cols", {}, grid, el("div.card", { style: "padding:0" }, picture)), el("div", { style: "height:12px" }), detail);
    };

    const passes = () => {
      const body = el("div.grid.mono.diff", { style: "height:620px", tabindex: "0" });
      const changes = stages.map((s, i) => i ? null : { plus: 0, minus: 0 });
      const look = i => {
        const d = i ? difference(stages[i - 1].lines, stages[i].lines) : stages[0].lines.map(t => [" ", t]);
        changes[i] = { plus: d.filter(x => x[0] === "+").length, minus: d.filter(x => x[0] === "-").length };
        const near = new Set();
        d.forEach(([k], at) => { if (k !== " ") for (let n = at - 3; n <= at + 3; n++) near.add(n); });
        const out = [];
        d.forEach(([k, t], at) => { if (!i || near.has(at)) out.push([k, t]); else if (out.length === 0 || out[out.length - 1][0] !== "…") out.push(["…", ""]); else out[out.length - 1][1] = ""; });
        const lines = table([{ name: `${stages[i].name}: +${changes[i].plus} −${changes[i].minus} lines`, width: 2400, mono: true, show: ([k, t]) => el("span." + ({ "+": "add", "-": "del", "…": "gap" }[k] || "same"), { title: t, style: "display:block;white-space:pre" }, k === "…" ? "⋯" : k + " " + t) }], out, { height: 620, tree: true });
        lines.classList.add("diff");
        body.replaceWith(lines); holder.replaceChildren(...(i && changes[i].plus + changes[i].minus ? [el("div.card", { style: "max-height:300px;overflow:auto" }, pictured(i, d)), lines] : [lines])); list.redraw();
      };
      // before and after: what is gone and what is new, with what feeds it and what reads it
      const pictured = (i, d) => {
        const sides = [["-", i - 1, "#c2554d"], ["+", i, "#3f9a66"]].map(([sign, at, color]) => {
          const texts = new Set(d.filter(x => x[0] === sign).map(x => x[1].trim())), kept = new Map(), all = [];
          for (const c of parse(stages[at].text).computations.values()) {
            const of = new Map(c.rows.map(r => [r.name, r])), marked = c.rows.filter(r => texts.has(r.text));
            for (const r of marked) { r.color = color; all.push([r, of]); }
          }
          const few = all.slice(0, 40);
          for (const [r, of] of few) { kept.set(r, of); }
          for (const [r, of] of few) for (const x of of.values()) if (kept.size < 70 && (r.operands.includes(x.name) || x.operands.includes(r.name))) kept.set(x, of);
          const depth = new Map(), deep = r => { if (!depth.has(r)) { depth.set(r, 0); depth.set(r, Math.max(-1, ...r.operands.map(o => kept.get(r).get(o)).filter(o => o && kept.has(o)).map(deep)) + 1); } return depth.get(r); };
          [...kept.keys()].sort((a, b) => a.index - b.index).forEach(deep);
          const levels = []; for (const [r, n] of depth) (levels[n] ??= []).push(r);
          return { kept, levels, more: all.length - few.length };
        });
        const tall = 30 + 40 * Math.max(...sides.map(s => sum(s.levels, l => Math.ceil(l.length / 6))));
        return drawing(tall, (g, w, h, c) => sides.forEach(({ kept, levels, more }, side) => {
          const left = side * w / 2 + 8, wide = w / 2 - 24, place = new Map();
          g.fillStyle = c("soft"); g.fillText((side ? "after" : "before") + (more > 0 ? `, ${more} more` : ""), left, 14);
          let y = 24;
          for (const level of levels) for (let k = 0; k < level.length; k += 6) { const part = level.slice(k, k + 6), each = Math.min(170, wide / part.length); part.forEach((r, n) => place.set(r, [left + (wide - each * part.length) / 2 + n * each, y, each - 8])); y += 40; }
          g.strokeStyle = c("soft"); g.lineWidth = 0.8;
          for (const [r, [x, yy, b]] of place) for (const o of r.operands) { const p = place.get(kept.get(r).get(o)); if (p) { g.beginPath(); g.moveTo(p[0] + p[2] / 2, p[1] + 26); g.lineTo(x + b / 2, yy); g.stroke(); } }
          for (const [r, [x, yy, b]] of place) { g.fillStyle = r.color || c("card"); g.fillRect(x, yy, b, 26); g.strokeStyle = r.color || c("line"); g.strokeRect(x, yy, b, 26); g.fillStyle = r.color ? "#fff" : c("ink"); g.fillText(fit(g, r.op, b - 8), x + 4, yy + 11); g.fillText(fit(g, r.shape, b - 8), x + 4, yy + 22); }
        }), `picture of what ${stages[i].name} changed`);
      };
      const holder = el("div", {}, body);
      const list = table([{ name: "pass", width: 142, show: s => s.name, mono: true }, { name: "lines", width: 78, num: true, show: s => s.lines.length }, { name: "instructions", width: 112, num: true, show: s => (s.rows ??= [...parse(s.text).computations.values()].reduce((n, c) => n + c.rows.length, 0)) }], stages, { height: 620, tree: true, pick: s => look(stages.indexOf(s)) });
      requestAnimationFrame(() => list.choose(Math.min(1, stages.length - 1)));
      return el("div", {}, el("div.soft", { style: "margin-bottom:8px" }, "What each pass changed: red is gone, green is new. Numbers in names do not count as changes. ↑ ↓ choose a pass."), el("div", { style: "display:grid;grid-template-columns:335px minmax(0,1fr);gap:14px" }, list, holder));
    };

    const fusions = () => {
      const detail = el("pre.card.detail", { style: "margin-top:12px;max-height:420px;overflow:auto" }, "Choose a step.");
      const steps = rows.filter(r => r.at !== undefined);
      const most = Math.max(...steps.map(r => Number(r.moved) || 0), 1), mostFlops = Math.max(...steps.map(r => (Number(r.flops) || 0) + r.matrix), 1);
      return el("div", {}, searched([
        { name: "step", width: 55, num: true, get: r => r.at }, { name: "instruction", width: 150, mono: true, get: r => "%" + r.name }, { name: "kind", width: 80, get: r => r.attrs.match(/kind=(\w+)/)?.[1] || r.op },
        { name: "moved", width: 90, num: true, get: r => Number(r.moved) || 0, show: r => bytes(r.moved), bar: r => r.moved / most },
        { name: "operations", width: 90, num: true, get: r => (Number(r.flops) || 0) + r.matrix, show: r => amount((Number(r.flops) || 0) + r.matrix), bar: r => ((Number(r.flops) || 0) + r.matrix) / mostFlops },
        { name: "contents", width: 330, mono: true, get: r => r.calls.length ? content(r) : r.op }, { name: "shape", width: 190, mono: true, get: r => r.shape }, { name: "layout", width: 80, mono: true, get: r => layout(r.shape) },
        { name: "line", width: 180, mono: true, get: r => r.line, show: r => short(r.line) + (r.backward ? " ←" : ""), title: r => r.source }, { name: "module", width: 130, mono: true, get: r => r.module }], steps, r => r.text + content(r), { height: 380, pick: r => { detail.textContent = describe(r); }, sort: "step" }), detail);
    };

    const memory = () => {
      const arena = buffers.filter(b => !Number.isNaN(b.offset)), top = Math.max(...arena.map(b => b.offset + b.bytes), 1), last = Math.max(...buffers.map(b => b.end), P.steps.length, 1);
      const info = el("div.mono.soft", { style: "margin-top:6px" }, (P.buffers || "").split("\n")[0]);
      const box = (w, h) => [t => 60 + t / (last + 1) * (w - 70), v => h - 22 - v / top * (h - 34)];
      const chart = drawing(380, (g, w, h, c) => {
        const [x, y] = box(w, h);
        g.fillStyle = c("soft");
        for (const v of ticks(0, top, 5)) { g.fillText(bytes(Math.round(v)), 2, y(v) + 4); g.fillRect(60, y(v), w - 70, 0.4); }
        for (const t of ticks(0, last, 10)) g.fillText(Math.round(t), x(t), h - 6);
        arena.forEach((b, i) => { g.fillStyle = HUES[i % HUES.length]; g.globalAlpha = 0.8; const a = x(Math.max(b.start, 0)), e = x(Math.min(b.end, last) + 1), low = y(b.offset), high = y(b.offset + b.bytes); g.fillRect(a, high, Math.max(e - a - 1, 1), Math.max(low - high - 0.5, 1)); g.globalAlpha = 1; if (low - high > 12) { g.fillStyle = "#fff"; g.fillText(fit(g, b.names, e - a - 6), a + 3, high + 12); } });
        g.fillStyle = c("soft"); g.fillText("steps →", w - 50, h - 6);
      }, "buffers in the arena over time");
      chart.addEventListener("mousemove", e => { const [px, py] = at(chart, e), [x, y] = box(chart.clientWidth, chart.clientHeight), b = arena.find(b => px >= x(Math.max(b.start, 0)) && px <= x(b.end + 1) && py <= y(b.offset) && py >= y(b.offset + b.bytes) - 1); showTip(b ? `${bytes(b.bytes)} at ${b.offset}, steps ${b.start} to ${b.end}\n${b.names}` : "", e); });
      chart.addEventListener("mouseleave", () => showTip(""));
      return el("div", {}, el("div.card", {}, el("h2", {}, "The arena: where arrays live, and when"), chart, info), searched([{ name: "bytes", width: 90, num: true, get: b => b.bytes, show: b => bytes(b.bytes) }, { name: "place", width: 130, mono: true, get: b => b.slot }, { name: "from step", width: 96, num: true, get: b => b.start }, { name: "to step", width: 80, num: true, get: b => b.end }, { name: "arrays", width: 760, mono: true, get: b => b.names }], buffers, b => b.names + b.slot, { height: 300, sort: "-bytes" }));
    };

    const machine = () => {
      const steps = rows.filter(r => r.at !== undefined).sort((a, b) => a.at - b.at), panes = ["HLO", "LLVM IR", "assembly"].map(n => el("div", {}, el("h2", {}, n), el("div"))), wide = el("div", { style: "display:grid;grid-template-columns:repeat(3,minmax(0,1fr));gap:10px;margin-top:12px" }, panes);
      const fill = (pane, text) => pane.lastChild.replaceWith(table([{ name: " ", width: 1400, mono: true, show: t => el("span", { style: "white-space:pre" }, t[0]) }], text.split("\n").map(t => [t]), { height: 480, tree: true }));
      const list = table([{ name: "step", width: 55, num: true, show: r => r.at }, { name: "instruction", width: 160, mono: true, show: r => "%" + r.name }, { name: "contents", width: 420, mono: true, show: r => r.calls.length ? content(r) : r.op }, { name: "functions", width: 420, mono: true, show: r => (r.functions || []).filter(f => functions.has(f)).join(", ") }, { name: "line", width: 180, mono: true, show: r => short(r.line) }], steps, { height: 200, tree: true, pick: r => {
        const names = reach(r.functions || []);
        fill(panes[0], describe(r)); fill(panes[1], names.map(f => functions.get(f).llvm).join("\n\n") || "written into the entry"); fill(panes[2], names.map(f => functions.get(f).asm).filter(Boolean).join("\n") || "written into the entry");
      } });
      requestAnimationFrame(() => list.choose(0));
      return el("div", {}, list, wide);
    };
    // ---- many devices: where each array lives, and what the collectives send
    const first = stages.find(s => s.name === "propagate") || stages[0], meshText = first.text.match(/frontend_attributes=\{mesh="([^"]*)"/)?.[1] || "";
    const axes = meshText.split(";")[0].split(",").filter(Boolean).map(a => a.split("=")).map(([name, n]) => ({ name, n: Number(n) })), ndev = axes.reduce((a, x) => a * x.n, 1);
    const ids = meshText.split(";devices=")[1]?.split(",").map(Number) || [...Array(ndev).keys()], coords = i => { const out = {}; for (const a of [...axes].reverse()) { out[a.name] = i % a.n; i = Math.floor(i / a.n); } return out; };
    const balanced = (s, i) => { let d = 0, j = i; for (; j < s.length; j++) { if (s[j] === "{") d++; else if (s[j] === "}" && !--d) break; } return s.slice(i, j + 1); };
    const attribute = (r, name) => { const i = r.attrs.indexOf(`, ${name}={`); return i < 0 ? "" : balanced(r.attrs, i + name.length + 3); };
    const parts = text => (text.match(/\[((?:\{[^}]*\}(?:p\d+)?(?:, )?)*)\]/)?.[1].match(/\{[^}]*\}/g) || []).map(d => d.slice(1, -1).split(", ").filter(a => a && a !== "?").map(a => { const m = a.match(/^(.+?)(?::\((\d+)\)(\d+))?$/), all = axes.find(x => x.name === m[1])?.n || 1; return { name: m[1], all, pre: Number(m[2] || 1), n: Number(m[3] || all) }; }));
    const block = (dims, i) => { const c = coords(i); return dims.map(d => d.reduce((at, a) => at * a.n + Math.floor(c[a.name] / (a.all / (a.pre * a.n))) % a.n, 0)); };
    const tilesOf = dims => dims.map(d => d.reduce((n, a) => n * a.n, 1));
    const devices = () => {
      const why = new Map((P.shardings || "").split("\n").map(l => l.match(/^(\S+) .*?\}: (.*)$/)).filter(Boolean).map(m => [m[1], m[2]]));
      const tensors = parse(first.text).entry.rows.filter(r => attribute(r, "sharding")).map(r => { const sharding = attribute(r, "sharding"), dims = parts(sharding), t = tilesOf(dims), size = r.shape.match(/\[([^\]]*)\]/)?.[1].split(",").filter(Boolean).map(Number) || [], n = t.reduce((a, b) => a * b, 1); return { ...r, sharding, dims, tiles: t, size, local: size.map((s, i) => Math.ceil(s / (t[i] || 1))), share: r.bytes / n, copies: ndev / n, why: why.get(r.name) || "" }; });
      const kinds = /^(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|ragged-all-to-all)(-start)?$/;
      const sends = [...final.computations.values()].flatMap(c => { const rows = new Map(c.rows.map(r => [r.name, r])); return c.rows.filter(r => kinds.test(r.op)).map(r => {
        const permute = r.op.startsWith("collective-permute"), groups = [...attribute(r, permute ? "source_target_pairs" : "replica_groups").matchAll(/\{([\d, ]+)\}/g)].map(m => m[1].split(",").map(Number)), members = groups.length ? groups : [ids], n = members[0].length, from = r.operands.map(o => rows.get(o)).filter(Boolean), size = sum(from, o => o.bytes), kind = r.op.match(kinds)[1];
        const factor = { "all-reduce": 2 * (n - 1) / n, "all-gather": n - 1, "collective-permute": 1, "collective-broadcast": 1 }[kind] ?? (n - 1) / n, used = axes.filter(a => members.some(m => new Set(m.map(d => coords(ids.indexOf(d))[a.name])).size > 1)).map(a => a.name), origin = from.find(o => o.source) || r;
        return { ...r, kind, members, permute, sent: size * factor, axes: used.join(", "), line: origin.line, module: origin.module, source: origin.source, of: from.map(o => `%${o.name} ${o.shape}`).join(", ") }; }); });
      let shown = tensors[0] || sends[0];
      const rest = axes.slice(0, -2), [ra, ca] = axes.length > 1 ? axes.slice(-2) : [{ name: "", n: 1 }, axes[0] || { name: "", n: 1 }];
      const picture = drawing(320, (g, w, h, c) => {
        if (!shown) return;
        const planes = rest.reduce((a, x) => a * x.n, 1), half = w * 0.5, step = Math.max(16, Math.min(74, (half - 40) / (planes * ca.n + (planes - 1) * 0.4), (h - 60) / ra.n)), rad = Math.min(17, step * 0.38);
        const spot = i => { const k = coords(i), plane = rest.reduce((a, x) => a * x.n + k[x.name], 0); return [50 + (plane * (ca.n + 0.4) + (k[ca.name] || 0)) * step + rad, 44 + (k[ra.name] || 0) * step + rad]; };
        g.fillStyle = c("soft"); g.fillText("mesh " + axes.map(a => `${a.name} = ${a.n}`).join(", ") + (ra.name ? `   (rows: ${ra.name}, columns: ${ca.name}${rest.length ? ", blocks: " + rest.map(a => a.name).join(", ") : ""})` : ""), 8, 16);
        const hue = k => HUES[k % HUES.length], keys = [], tint = []; let list = [];
        if (shown.members) {
          shown.members.forEach((m, k) => { g.strokeStyle = hue(k); g.lineWidth = 3; const at = m.map(d => spot(ids.indexOf(d))); g.beginPath(); at.forEach(([x, y], j) => j ? g.lineTo(x, y) : g.moveTo(x, y)); g.stroke(); if (!shown.permute) m.forEach(d => { tint[ids.indexOf(d)] = hue(k); }); else { const [[x1, y1], [x2, y2]] = [at[0], at[1]], a = Math.atan2(y2 - y1, x2 - x1); g.beginPath(); g.moveTo(x2 - rad * Math.cos(a), y2 - rad * Math.sin(a)); for (const s of [2.6, -2.6]) g.lineTo(x2 - rad * Math.cos(a) + 10 * Math.cos(a + s), y2 - rad * Math.sin(a) + 10 * Math.sin(a + s)); g.fillStyle = hue(k); g.fill(); } });
          list = shown.members.slice(0, 14).map((m, k) => [hue(k), shown.permute ? `${m[0]} → ${m[1]}` : `devices ${m.join(", ")}`]);
        } else {
          for (let i = 0; i < ndev; i++) { const key = block(shown.dims, i).join(","); if (!keys.includes(key)) keys.push(key); tint[i] = hue(keys.indexOf(key)); }
        }
        for (let i = 0; i < ndev; i++) { const [x, y] = spot(i); g.fillStyle = tint[i] || c("soft"); g.beginPath(); g.arc(x, y, rad, 0, 7); g.fill(); g.fillStyle = "#fff"; g.textAlign = "center"; if (rad > 7) g.fillText(ids[i], x, y + 4); g.textAlign = "left"; }
        g.fillStyle = c("ink");
        if (shown.members) { g.fillText(`${shown.kind} over ${shown.axes || "no axis"}: ${bytes(Math.round(shown.sent))} from each device`, half + 10, 16); list.forEach(([color, t], k) => { g.fillStyle = color; g.fillRect(half + 10, 30 + k * 19, 11, 11); g.fillStyle = c("ink"); g.fillText(fit(g, t, w - half - 40), half + 28, 40 + k * 19); }); return; }
        g.fillText(fit(g, `%${shown.name} ${shown.shape}: blocks of [${shown.local.join(",")}], ${shown.copies === 1 ? "one copy" : shown.copies + " copies"}`, w - half - 20), half + 10, 16);
        const split = shown.tiles.map((n, d) => d).filter(d => shown.tiles[d] > 1), [rd, cd] = split.length > 1 ? split.slice(-2) : split[0] === shown.tiles.length - 1 ? [-1, split[0] ?? -1] : [split[0] ?? -1, -1], nr = shown.tiles[rd] || 1, nc = shown.tiles[cd] || 1, W = w - half - 24, H = h - 60;
        for (let y = 0; y < nr; y++) for (let x = 0; x < nc; x++) {
          const has = [...Array(ndev).keys()].filter(i => { const b = block(shown.dims, i); return (rd < 0 || b[rd] === y) && (cd < 0 || b[cd] === x); }), px = half + 10 + x * W / nc, py = 30 + y * H / nr;
          g.fillStyle = tint[has[0]] || c("soft"); g.globalAlpha = 0.85; g.fillRect(px, py, W / nc - 2, H / nr - 2); g.globalAlpha = 1; g.fillStyle = "#fff"; g.fillText(fit(g, has.map(i => ids[i]).join(","), W / nc - 10), px + 5, py + 14);
        }
        g.fillStyle = c("soft"); g.fillText([rd >= 0 ? `down: dimension ${rd}` : "", cd >= 0 ? `across: dimension ${cd}` : "", split.length > 2 ? "dimensions before are not drawn" : ""].filter(Boolean).join(", "), half + 10, h - 12);
      }, "devices of the mesh, and the blocks of the chosen array or the groups of the chosen collective");
      const look = r => { shown = r; picture.draw(); };
      return el("div", {}, el("div.card", {}, picture), el("h2", {}, `Arrays: ${count(tensors.length)}`), searched([
        { name: "array", width: 140, mono: true, get: r => "%" + r.name, title: r => r.text }, { name: "op", width: 110, mono: true, get: r => r.op }, { name: "shape", width: 150, mono: true, get: r => r.shape }, { name: "sharding", width: 190, mono: true, get: r => r.sharding }, { name: "on a device", width: 110, mono: true, get: r => `[${r.local.join(",")}]` }, { name: "bytes", width: 80, num: true, get: r => r.share, show: r => bytes(Math.round(r.share)) }, { name: "copies", width: 60, num: true, get: r => r.copies }, { name: "because", width: 330, get: r => r.why }, { name: "line", width: 170, mono: true, get: r => r.line, show: r => short(r.line), title: r => r.source }, { name: "module", width: 120, mono: true, get: r => r.module }], tensors, r => r.text + r.why, { height: 250, pick: look }), el("h2", { style: "margin-top:14px" }, `Collectives: ${count(sends.length)}, ${bytes(Math.round(sum(sends, r => r.sent)))} from each device`), searched([
        { name: "collective", width: 140, mono: true, get: r => r.kind, title: r => r.text }, { name: "axes", width: 80, mono: true, get: r => r.axes }, { name: "sent", width: 90, num: true, get: r => r.sent, show: r => bytes(Math.round(r.sent)) }, { name: "groups", width: 70, num: true, get: r => r.members.length }, { name: "of", width: 420, mono: true, get: r => r.of }, { name: "line", width: 200, mono: true, get: r => r.line, show: r => short(r.line), title: r => r.source }, { name: "module", width: 160, mono: true, get: r => r.module }], sends, r => r.text, { height: 200, pick: look }));
    };
    const views = { graph, passes };
    if (axes.length && P.shardings) views.mesh = devices;
    if (P.steps.length) Object.assign(views, { steps: fusions, memory, code: machine });
    return [views, [tile(count(rows.length), "instructions"), P.steps.length ? tile(count(P.steps.length), "steps") : null, P.steps.length ? tile(count(rows.filter(r => r.op === "fusion").length), "fusions") : null, tile(count(stages.length - 1), "passes changed it"), P.steps.length ? tile(bytes(sum(P.steps, s => Number(s[1]) || 0)), "moved") : null, P.buffers ? tile(bytes(Number(P.buffers.match(/arena (\d+)/)?.[1]) || 0), "arena") : null].filter(Boolean)];
  }

  const draw = i => {
    document.body.querySelectorAll("header, main").forEach(e => e.remove());
    const P = DATA.programs[i], [views, tiles] = show(P);
    const choice = DATA.programs.length > 1 ? el("select", { "aria-label": "program", onchange: () => draw(Number(choice.value)) }, DATA.programs.map((p, n) => el("option", { value: n, ...(n === i ? { selected: "" } : {}) }, p.name))) : "";
    frame(P.name, el("span", {}, choice, " ", P.reason || ""), tiles, views);
  };
  draw(0);
}

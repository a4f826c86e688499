// A recorded run: what happened when, what took the time, who holds memory, where Python waits, what to change.
{
  const T = DATA.texts, TRACKS = DATA.tracks, K = DATA.kernels;
  const zero = DATA.began, spans = DATA.spans.map(([track, name, start, took, line, note]) => ({ track: T[track], start: (start - zero) * 1e6, dur: took * 1e6, name: T[name], line: T[line], note })).sort((a, b) => a.start - b.start);
  DATA.advice = DATA.advice.map(([title, text, line, weight]) => ({ title, text, line, weight }));
  const held = list => list.map(([line, what, bytes, count]) => ({ line, what, bytes, count }));
  DATA.peak = { at: DATA.peak[0] - zero, bytes: DATA.peak[1], held: held(DATA.peak[2]) };
  DATA.end = held(DATA.end);
  DATA.memory = DATA.memory.map(([t, used, scratch]) => [t - zero, used, scratch]);
  const of = track => spans.filter(s => s.track === track), us = v => seconds(v / 1e6);
  const color = { steps: HUES[0], transfers: HUES[5], waits: HUES[7], compiles: HUES[1], programs: HUES[4], kernels: HUES[2], collectives: HUES[6] };
  const wall = DATA.seconds * 1e6, ran = sum(of("programs"), s => s.dur), waited = sum(of("waits"), s => s.dur), compiled = sum(of("compiles"), s => s.dur);
  const outer = K.filter(k => !k.depth), device = sum(outer, k => k.total) || 1e-12, L = DATA.limits;

  // The module of a backward kernel is that of the same operation on its line: layers.*.fc where there are several.
  for (const k of K) Object.assign(k, sourceParts(k.sources[0] || ""), { lines: k.sources, matrix: k.matrix_flops });
  const key = k => k.line + "\0" + k.name.replace(/^aten\./, "").split("_backward")[0].split(".")[0], known = grouped(K.filter(k => k.module), key);
  for (const k of K) if (!k.module && k.line && known.has(key(k))) {
    const exact = [...new Set(known.get(key(k)).map(x => x.module))], several = [...new Set(exact.map(m => m.replace(/\d+/g, "*")))];
    if (several.length === 1) k.module = exact.length === 1 ? exact[0] : several[0];
  }

  // ---- advice
  const advice = () => el("div", {},
    el("div.card", {}, el("h2", {}, "What to change"), DATA.advice.length ? DATA.advice.map(a => el("div.advice" + (a.weight > 0.3 ? ".bad" : ""), {}, el("b", {}, short(a.title)), el("div", { title: a.text }, short(a.text)))) : el("div.advice.good", {}, "Nothing found.")),
    el("div.card", {}, el("h2", {}, "Where the time went"), drawing(64, (g, w, h, c) => {
      const parts = [["compiling", compiled, color.compiles], ["programs run", ran, color.programs]];
      let y = 0;
      for (const [name, time, hue] of parts) {
        g.fillStyle = c("line"); g.fillRect(110, y + 4, w - 240, 16);
        g.fillStyle = hue; g.fillRect(110, y + 4, Math.max(1, Math.min(1, time / wall) * (w - 240)), 16);
        g.fillStyle = c("ink"); g.fillText(name, 0, y + 16); g.fillText(`${us(time)}, ${percent(time / wall)}`, w - 122, y + 16);
        y += 30;
      }
    }, "shares of the run"), el("div.soft", {}, `of the run's ${us(wall)}. Recording is slower than usual while a run is profiled: Python lines are looked for.`)),
    el("div.card", {}, el("h2", {}, "Kernels that took longest"), table(columns().slice(0, 6), [...outer].sort((a, b) => b.total - a.total).slice(0, 8), { height: 260 })));

  // ---- timeline
  const timeline = () => {
    const lanes = [], rows = new Map();
    for (const name of TRACKS) {
      const ends = [], mine = spans.filter(s => s.track === name && s.name);
      for (const s of mine) {
        let lane = ends.findIndex(e => e <= s.start + 1e-3);
        if (lane < 0) { lane = Math.min(ends.length, 3); }
        ends[lane] = Math.max(ends[lane] || 0, s.start + s.dur);
        s.lane = lane;
      }
      if (mine.length) { rows.set(name, lanes.length); for (let i = 0; i < ends.length; i++) lanes.push(i ? "" : name); }
    }
    const H = 22, top = 22, left = 96, end = Math.max(wall, ...spans.map(s => s.start + s.dur)) || 1;
    const steady = of("programs"), last = steady[steady.length - 1];
    let from = 0, to = end, picked = null;
    const info = el("div.card.detail.mono", { "aria-live": "polite" }, "Move over the timeline. Drag or ← → to move, wheel or + − to zoom, 0 for all, n and p for the next and previous span, s for the last steps.");
    const byTrack = new Map(TRACKS.map(t => [t, of(t).filter(s => s.name)]));
    const canvas = drawing(top + lanes.length * H + 6, (g, w, h, c) => {
      const x = t => left + (t - from) / (to - from) * (w - left);
      g.fillStyle = c("soft"); g.strokeStyle = c("line");
      for (const t of ticks(from, to, 8)) { g.fillText(us(t), x(t) + 3, 12); g.fillRect(x(t), 0, 0.5, h); }
      lanes.forEach((name, i) => { g.fillStyle = c("ink"); if (name) { g.fillText(name, 2, top + i * H + 14); g.fillStyle = c("line"); g.fillRect(0, top + i * H - 1, w, 0.5); } });
      g.save(); g.beginPath(); g.rect(left, 0, w - left, h); g.clip();
      for (const [track, list] of byTrack) {
        const drawn = {};
        for (const s of list) {
          if (s.start > to || s.start + s.dur < from) continue;
          const a = x(s.start), b = x(s.start + s.dur), y = top + (rows.get(track) + s.lane) * H;
          if (b < (drawn[s.lane] || -1)) continue; // less than a pixel, and it is drawn already
          g.fillStyle = color[track]; g.globalAlpha = s === picked ? 1 : 0.85;
          g.fillRect(a, y, Math.max(b - a - 0.5, 0.8), H - 4);
          if (s === picked) { g.strokeStyle = c("ink"); g.lineWidth = 2; g.strokeRect(a, y, Math.max(b - a, 2), H - 4); }
          g.globalAlpha = 1;
          if (b - a > 30) { g.fillStyle = "#fff"; g.fillText(fit(g, s.name, Math.min(b, w) - Math.max(a, left) - 6), Math.max(a, left) + 3, y + 13); }
          drawn[s.lane] = Math.max(b, a + 0.8);
        }
      }
      g.restore();
    }, "timeline");
    canvas.tabIndex = 0;
    const text = s => {
      const k = s.track === "kernels" || s.track === "collectives" ? K.find(k => k.what === s.name) : null;
      return `${s.name}\n${us(s.dur)} at ${us(s.start)}` + (s.line ? `\n${s.line}` : "") + (s.track === "transfers" ? `\n${bytes(s.note)}` : s.note ? `\n${s.note}` : "") +
        (k ? `\n${k.name}: ${bytes(k.bytes)}, ${amount(k.flops)} flops, ${amount(k.matrix)} in products, ${percent(k.limit)} of the machine's limit` : "");
    };
    const hit = e => {
      const [px, py] = at(canvas, e), t = from + (px - left) / (canvas.clientWidth - left) * (to - from), lane = Math.floor((py - top) / H), slack = (to - from) / canvas.clientWidth * 2;
      let best = null;
      for (const [track, list] of byTrack) if (rows.has(track)) for (const s of list) if (rows.get(track) + s.lane === lane && t >= s.start - slack && t <= s.start + s.dur + slack && (!best || s.dur < best.dur)) best = s;
      return best;
    };
    const move = (a, b) => { const wide = Math.max(Math.min(b - a, end), 0.05); from = Math.max(0, Math.min(a, end - wide)); to = from + wide; canvas.draw(); };
    const zoom = (factor, middle = (from + to) / 2) => move(middle - (middle - from) * factor, middle + (to - middle) * factor);
    const pick = s => { if (!s) return; picked = s; info.textContent = text(s); if (s.start < from || s.start + s.dur > to) move(s.start - (to - from) * 0.3, s.start + (to - from) * 0.7); canvas.draw(); };
    canvas.addEventListener("wheel", e => { e.preventDefault(); zoom(e.deltaY > 0 ? 1.25 : 0.8, from + (at(canvas, e)[0] - left) / (canvas.clientWidth - left) * (to - from)); }, { passive: false });
    let grip = null;
    canvas.addEventListener("pointerdown", e => { grip = [e.clientX, from, to, false]; canvas.setPointerCapture(e.pointerId); });
    canvas.addEventListener("pointermove", e => {
      if (!grip) { const s = hit(e); showTip(s ? text(s) : "", e); return; }
      const by = (grip[0] - e.clientX) / (canvas.clientWidth - left) * (grip[2] - grip[1]);
      if (Math.abs(grip[0] - e.clientX) > 3) grip[3] = true;
      if (grip[3]) move(grip[1] + by, grip[2] + by);
    });
    canvas.addEventListener("pointerup", e => { if (grip && !grip[3]) pick(hit(e)); grip = null; });
    canvas.addEventListener("pointerleave", () => showTip(""));
    const recent = () => { const list = steady.slice(-8); if (list.length) { const a = list[0].start, b = last.start + last.dur; move(a - (b - a) * 0.08, b + (b - a) * 0.08); } };
    canvas.addEventListener("keydown", e => {
      const wide = to - from, act = { ArrowLeft: () => move(from - wide / 5, to - wide / 5), ArrowRight: () => move(from + wide / 5, to + wide / 5), "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1.6), 0: () => move(0, end), s: recent,
        n: () => pick(step(1)), p: () => pick(step(-1)) }[e.key];
      const step = by => { const list = byTrack.get(picked ? picked.track : "programs"); return list[Math.max(0, list.indexOf(picked) + by)]; };
      if (act) { act(); e.preventDefault(); e.stopPropagation(); }
    });
    if (steady.length > 4) recent();
    const button = (name, act) => el("button", { onclick: act }, name);
    return el("div", {}, el("div.tools", {}, button("all", () => move(0, end)), button("last steps", recent), button("+", () => zoom(0.6)), button("−", () => zoom(1.6)),
      [...rows.keys()].map(t => el("span.key", {}, el("i", { style: `background:${color[t]}` }), t)), DATA.left_out ? el("span.soft", {}, `${count(DATA.left_out)} short spans are left out`) : ""),
      el("div.card", { style: "padding:6px" }, canvas), info);
  };

  // ---- operations
  function columns() {
    return [
      { name: "total", width: 100, num: true, get: k => k.total, show: k => seconds(k.total), bar: k => k.total / device },
      { name: "share", width: 70, num: true, get: k => k.total, show: k => percent(k.total / device) },
      { name: "limit", width: 70, num: true, get: k => k.limit, show: k => typeof k.limit === "number" && k.limit ? percent(k.limit) : "", bar: k => k.limit },
      { name: "line", width: 180, mono: true, get: k => k.line, show: k => short(k.line) + (k.backward ? " ←" : ""), title: k => k.lines ? k.lines.join("\n") : k.line },
      { name: "module", width: 130, get: k => k.module, mono: true },
      { name: "kernel", width: 460, get: k => k.what, mono: true },
      { name: "calls", width: 60, num: true, get: k => k.calls },
      { name: "best", width: 90, num: true, get: k => k.best, show: k => seconds(k.best) },
      { name: "bytes", width: 90, num: true, get: k => k.bytes, show: k => bytes(k.bytes) },
      { name: "flops", width: 80, num: true, get: k => k.flops, show: k => amount(k.flops) },
      { name: "in products", width: 95, num: true, get: k => k.matrix, show: k => amount(k.matrix) },
      { name: "program", width: 90, get: k => k.program },
    ];
  }
  const operations = () => {
    const holder = el("div"), detail = el("div.card.detail", { style: "margin-top:12px" }, el("span.soft", {}, "Choose a row."));
    const tell = k => detail.replaceChildren(el("h2", {}, k.what), el("div.mono", {}, k.lines ? `${k.program}, ${k.name}${k.depth ? ", inside a loop or branch" : ""}\n${k.calls} calls, ${seconds(k.total)} in all, at best ${seconds(k.best)}\n${bytes(k.bytes)} moved, ${amount(k.flops)} operations and ${amount(k.matrix)} in products at least; ${percent(k.limit)} of the machine's limit\n${k.lines.join("\n")}` : k.rows.map(r => `${seconds(r.total)}  ${r.what}`).join("\n")));
    const views = {
      kernel: () => searched(columns(), [...K].sort((a, b) => b.total - a.total), k => `${k.what} ${k.line} ${k.module} ${k.program} ${k.name}`, { height: 520, pick: tell, sort: "-total" }),
      ...Object.fromEntries([["line", k => k.line || "(no line)"], ["module", k => k.module || "(no module)"], ["HLO opcode", k => k.op], ["program", k => k.program]].map(([name, key]) => [name, () => {
        const groups = [...grouped(outer, key)].map(([what, rows]) => ({ what, rows, total: sum(rows, r => r.total), calls: sum(rows, r => r.calls), n: rows.length, backward: sum(rows, r => r.backward ? r.total : 0), ideal: sum(rows, r => r.total * (r.limit || 0)) }));
        return searched([
          { name: "total", width: 110, num: true, get: r => r.total, show: r => seconds(r.total), bar: r => r.total / device },
          { name: "share", width: 80, num: true, get: r => r.total, show: r => percent(r.total / device) },
          { name: "backward", width: 100, num: true, get: r => r.backward, show: r => r.backward ? percent(r.backward / r.total) : "" },
          { name: "limit", width: 80, num: true, get: r => r.ideal / r.total, show: r => percent(r.ideal / r.total), bar: r => r.ideal / r.total },
          { name: "kernels", width: 80, num: true, get: r => r.n }, { name: "calls", width: 80, num: true, get: r => r.calls },
          { name, width: 600, mono: true, get: r => r.what, show: r => short(r.what), title: r => r.what }], groups, r => r.what, { height: 520, pick: tell, sort: "-total" });
      }])),
    };
    const choice = el("select", { "aria-label": "group by", onchange: () => { holder.replaceChildren(views[choice.value]()); } }, Object.keys(views).map(v => el("option", { value: v }, "by " + v)));
    holder.append(views.kernel());
    return el("div", {}, el("div.tools", {}, choice, el("span.soft", {}, "limit: the share of what the machine's memory and arithmetic units could do; 100 % is at the limit: also data in caches, which are faster than memory. ←: backward pass.")), holder, detail);
  };

  // ---- memory
  const memory = () => {
    const M = DATA.memory, P = DATA.peak;
    const most = Math.max(...M.map(m => m[1] + m[2]), 1), end = Math.max(DATA.seconds, M.length ? M[M.length - 1][0] : 1);
    const chart = drawing(240, (g, w, h, c) => {
      const x = t => 62 + t / end * (w - 70), y = v => h - 22 - v / most * (h - 40);
      g.fillStyle = c("soft");
      for (const v of ticks(0, most, 4)) { g.fillText(bytes(Math.round(v)), 2, y(v) + 4); g.fillRect(62, y(v), w - 70, 0.4); }
      for (const t of ticks(0, end, 8)) g.fillText(seconds(t), x(t), h - 6);
      const area = (f, hue, alpha) => {
        g.beginPath(); g.moveTo(x(M[0]?.[0] || 0), y(0));
        let before = 0;
        for (const m of M) { g.lineTo(x(m[0]), y(before)); before = f(m); g.lineTo(x(m[0]), y(before)); }
        g.lineTo(x(end), y(before)); g.lineTo(x(end), y(0));
        g.fillStyle = hue; g.globalAlpha = alpha; g.fill(); g.globalAlpha = 1;
      };
      if (!M.length) return;
      area(m => m[1] + m[2], HUES[1], 0.55); area(m => m[1], HUES[0], 0.9);
      g.fillStyle = c("bad"); g.fillRect(x(P.at), 14, 1.5, h - 36); g.fillText(`peak ${bytes(P.bytes)}`, Math.min(x(P.at) + 4, w - 100), 12);
    }, "memory over time");
    chart.addEventListener("mousemove", e => {
      const t = (at(chart, e)[0] - 62) / (chart.clientWidth - 70) * end, m = M.filter(m => m[0] <= t).pop();
      showTip(m ? `${seconds(m[0])}: ${bytes(m[1])} in arrays, ${bytes(m[2])} scratch` : "", e);
    });
    chart.addEventListener("mouseleave", () => showTip(""));
    const holders = (title, list) => el("div.card", {}, el("h2", {}, title), table([
      { name: "bytes", width: 100, num: true, get: h => h.bytes, show: h => bytes(h.bytes), bar: h => h.bytes / Math.max(sum(list, x => x.bytes), 1) },
      { name: "arrays", width: 70, num: true, get: h => h.count },
      { name: "line", width: 230, mono: true, get: h => h.line, show: h => short(h.line) || "(unknown)", title: h => h.line },
      { name: "made by", width: 240, mono: true, get: h => h.what }], list, { height: 300, sort: "-bytes" }));
    return el("div", {}, el("div.card", {}, el("h2", {}, "Memory over time"), chart, el("div", { style: "margin-top:4px" }, el("span.key", {}, el("i", { style: `background:${HUES[0]}` }), "arrays"), el("span.key", {}, el("i", { style: `background:${HUES[1]}` }), "scratch of programs"))),
      el("div.cols", {}, holders(`Who held it at the peak (${seconds(P.at)})`, P.held), holders("Who holds it at the end", DATA.end)));
  };

  // ---- roofline
  const roofline = () => {
    const points = K.filter(k => typeof k.bytes === "number" && k.bytes && k.best > 0).map(k => [k, Math.max(k.matrix || k.flops, 0.01 * k.bytes)]).map(([k, n]) => ({ k, x: n / k.bytes, y: n / k.best }));
    const xs = points.map(p => p.x).concat(0.05, L.f32 / L.bandwidth * 20), ys = points.map(p => p.y).concat(L.f32 * 2, L.bf16 * 1.2, L.bandwidth * 0.01);
    const X = [Math.log10(Math.min(...xs)) - 0.2, Math.log10(Math.max(...xs)) + 0.2], Y = [Math.log10(Math.max(Math.min(...ys), 1e3)) - 0.2, Math.log10(Math.max(...ys)) + 0.2];
    let chosen = null;
    const place = (w, h) => [v => 70 + (Math.log10(v) - X[0]) / (X[1] - X[0]) * (w - 90), v => h - 34 - (Math.log10(v) - Y[0]) / (Y[1] - Y[0]) * (h - 50), k => 3 + 14 * Math.sqrt(k.total / device)];
    const chart = drawing(440, (g, w, h, c) => {
      const [x, y, r] = place(w, h);
      g.fillStyle = c("soft");
      for (let e = Math.ceil(X[0]); e <= X[1]; e++) { g.fillText(amount(10 ** e) + (e < 0 ? "" : ""), x(10 ** e) - 6, h - 18); g.fillRect(x(10 ** e), 10, 0.4, h - 44); }
      for (let e = Math.ceil(Y[0]); e <= Y[1]; e++) { g.fillText(amount(10 ** e), 4, y(10 ** e) + 4); g.fillRect(70, y(10 ** e), w - 90, 0.4); }
      g.fillText("operations per byte", w / 2 - 40, h - 4); g.fillText("operations per second", 4, 10);
      for (const [name, peak, hue] of [["f32", L.f32, HUES[0]], ["bf16", L.bf16, HUES[3]]]) {
        g.strokeStyle = hue; g.lineWidth = 2; g.beginPath(); g.moveTo(x(10 ** X[0]), y(10 ** X[0] * L.bandwidth)); g.lineTo(x(peak / L.bandwidth), y(peak)); g.lineTo(x(10 ** X[1]), y(peak)); g.stroke();
        g.fillStyle = hue; g.fillText(`${name} products: ${amount(peak)}flop/s`, w - 190, y(peak) + (name === "f32" ? 14 : -5));
      }
      for (const p of points) { g.beginPath(); g.arc(x(p.x), y(p.y), r(p.k), 0, 7); g.fillStyle = p.k.matrix ? HUES[1] : HUES[2]; g.globalAlpha = p === chosen ? 1 : 0.55; g.fill(); g.globalAlpha = 1; if (p === chosen) { g.strokeStyle = c("ink"); g.stroke(); } }
    }, "roofline");
    chart.addEventListener("mousemove", e => {
      const [px, py] = at(chart, e), [x, y, r] = place(chart.clientWidth, chart.clientHeight);
      chosen = points.find(p => Math.hypot(x(p.x) - px, y(p.y) - py) < r(p.k) + 3) || null;
      showTip(chosen ? `${chosen.k.what}\n${chosen.k.line}\n${seconds(chosen.k.best)}, ${percent(chosen.k.limit)} of the limit, ${percent(chosen.k.total / device)} of the device's time` : "", e);
      chart.draw();
    });
    chart.addEventListener("mouseleave", () => showTip(""));
    return el("div.card", {}, el("h2", {}, "Roofline: how near each kernel is to the machine's limits"), chart, el("div", {}, el("span.key", {}, el("i", { style: `background:${HUES[1]}` }), "products"), el("span.key", {}, el("i", { style: `background:${HUES[2]}` }), "other kernels"), el("span.soft", {}, `Area: share of the device's time. Memory ${amount(L.bandwidth)}B/s, measured. A kernel above the roof had its data in cache. Kernels that only move data stand at 0.01.`)));
  };

  // ---- where Python waits
  const waits = () => {
    const rows = [];
    for (const [key, list] of grouped(spans.filter(s => ["waits", "transfers", "steps"].includes(s.track) && s.name), s => s.track + "\0" + s.name + "\0" + s.line)) {
      const s = list[0];
      rows.push({ what: s.track === "waits" ? "waits for the device" : s.name, line: s.line, n: list.length, total: sum(list, x => x.dur), worst: Math.max(...list.map(x => x.dur)), bytes: s.track === "transfers" ? sum(list, x => x.note || 0) : "" });
    }
    return el("div", {}, el("div.soft", { style: "margin-bottom:8px" }, `Python waited ${us(waited)} for programs. A read that cuts the step compiles and runs what is recorded, and waits for it.`), searched([
      { name: "total", width: 110, num: true, get: r => r.total, show: r => us(r.total), bar: r => r.total / wall },
      { name: "times", width: 70, num: true, get: r => r.n }, { name: "longest", width: 90, num: true, get: r => r.worst, show: r => us(r.worst) },
      { name: "bytes", width: 90, num: true, get: r => r.bytes, show: r => r.bytes === "" ? "" : bytes(r.bytes) },
      { name: "what", width: 200, get: r => r.what }, { name: "line", width: 480, mono: true, get: r => r.line, show: r => short(r.line), title: r => r.line }], rows, r => r.what + " " + r.line, { height: 560, sort: "-total" }));
  };

  const compiles = () => searched([
    { name: "program", width: 90, get: c => Number((c.name || "").split("_")[1]) || 0, show: c => c.name || "note" }, { name: "time", width: 90, num: true, get: c => c.seconds, show: c => c.seconds ? seconds(c.seconds) : "", bar: c => c.seconds / DATA.seconds },
    { name: "cause", width: 150, get: c => c.kind }, { name: "line", width: 170, mono: true, get: c => c.line, show: c => short(c.line), title: c => c.line }, { name: "needed by", width: 170, mono: true, get: c => c.where, show: c => short(c.where), title: c => c.where },
    { name: "reason", width: 900, mono: true, get: c => c.text, show: c => short(c.text) }], DATA.compiles, c => c.text + c.where, { height: 560, sort: "program" });

  frame(DATA.title, `${count(DATA.steps)} steps in ${us(wall)}`, [
    tile(count(DATA.steps), "steps"), tile(us(ran), "programs ran"), tile(us(waited), "Python waited"), tile(`${DATA.compiles.filter(c => c.name).length}`, "compiles, " + us(compiled)),
    tile(bytes(DATA.peak.bytes), "peak of arrays"), tile(count(K.length), "kernels")],
    { advice, timeline, operations, memory, roofline, waits, compiles });
}

// Every compile of a run: why, where, how long, what to change.
{
  const all = DATA.compiles, compiles = all.filter(c => c.name), notes = all.filter(c => !c.name);
  const total = sum(compiles, c => c.seconds), wall = DATA.seconds, kinds = [...new Set(all.map(c => c.kind))];
  const hue = c => HUES[kinds.indexOf(c.kind) % HUES.length];
  const detail = el("div.card.detail", { "aria-live": "polite" }, el("span.soft", {}, "Choose a compile to read all of its reason."));
  const tell = c => detail.replaceChildren(
    el("h2", {}, `${c.name || "note"} — ${c.kind}`), el("div.mono", {}, c.text),
    c.where ? el("div.soft", { style: "margin-top:6px" }, "needed by ", el("span.mono", {}, c.where)) : "",
    c.advice ? el("div.advice", {}, c.advice) : "");
  const start = all.length ? Math.min(...all.map(c => c.began)) : 0, end = Math.max(start + (wall || 0), ...all.map(c => c.began + c.seconds), start + 1e-6);
  const strip = drawing(54, (g, w, h, color) => {
    const x = t => (t - start) / (end - start) * (w - 2);
    g.fillStyle = color("line"); g.fillRect(0, 30, w, 1);
    for (const c of compiles) { g.fillStyle = hue(c); g.fillRect(x(c.began), 6, Math.max(2, x(c.began + c.seconds) - x(c.began)), 24); }
    g.fillStyle = color("soft");
    for (const t of ticks(0, end - start, 8)) g.fillText(seconds(t), Math.min(x(start + t), w - 46), 46);
  }, "compiles over time");
  strip.addEventListener("mousemove", e => {
    const t = start + at(strip, e)[0] / strip.clientWidth * (end - start), slack = (end - start) / 200;
    const c = compiles.find(c => t >= c.began - slack && t <= c.began + c.seconds + slack);
    showTip(c ? `${c.name}: ${seconds(c.seconds)}\n${c.text}` : "", e);
  });
  strip.addEventListener("mouseleave", () => showTip(""));
  const overview = () => {
    const causes = [...grouped(all.filter(c => c.advice), c => c.kind + "\0" + c.line + "\0" + c.advice)].map(([, rows]) => rows).sort((a, b) => sum(b, c => c.seconds) - sum(a, c => c.seconds) || b.length - a.length);
    return el("div", {},
      el("div.card", {}, el("h2", {}, "Compiles over time"), strip, el("div", { style: "margin-top:6px" }, kinds.map((k, i) => el("span.key", {}, el("i", { style: `background:${HUES[i % HUES.length]}` }), k)))),
      el("div.card", {}, el("h2", {}, "What to change"), causes.length ? causes.map(rows => el("div.advice" + (rows.length > 2 ? ".bad" : ""), {},
        el("b", {}, `${rows.length} × ${rows[0].kind}`), rows[0].line ? [" at ", el("code", { title: rows[0].line }, short(rows[0].line))] : "", `, ${seconds(sum(rows, c => c.seconds))}`,
        el("div", {}, rows[0].advice), el("div.mono.soft", {}, rows[rows.length - 1].text))) : el("div.advice.good", {}, "Nothing: no compile could have been avoided.")));
  };
  const max = Math.max(...compiles.map(c => c.seconds), 1e-9);
  const columns = [
    { name: "program", width: 90, get: c => c.name ? Number(c.name.split("_")[1]) || 0 : -1, show: c => c.name || "note" },
    { name: "time", width: 100, num: true, get: c => c.seconds, show: c => c.seconds ? seconds(c.seconds) : "", bar: c => c.seconds / max },
    { name: "ops", width: 60, num: true, get: c => c.ops, show: c => c.ops || "" },
    { name: "result", width: 110, get: c => c.outcome },
    { name: "cause", width: 170, get: c => c.kind, show: c => el("span.key", {}, el("i", { style: `background:${hue(c)}` }), c.kind) },
    { name: "line", width: 170, get: c => c.line, show: c => short(c.line), title: c => c.line, mono: true },
    { name: "needed by", width: 170, get: c => c.where, show: c => short(c.where), title: c => c.where, mono: true },
    { name: "reason", width: 900, get: c => c.text, show: c => short(c.text), mono: true },
  ];
  frame(DATA.title || "Why programs were compiled", DATA.sub || "Every compile with its reason.", [
    tile(count(compiles.length), "compiles"), tile(seconds(total), "compiling"),
    wall ? tile(percent(total / wall), "of the run's " + seconds(wall)) : null,
    tile(count(compiles.filter(c => c.outcome === "from disk").length), "read from disk"),
    tile(count(DATA.steps || 0), "steps"), notes.length ? tile(count(notes.length), "notes") : null].filter(Boolean), {
    overview,
    compiles: () => el("div", {}, searched(columns, all, c => `${c.name} ${c.text} ${c.where} ${c.kind}`, { pick: tell, sort: "program" }), el("div", { style: "height:12px" }), detail),
  });
}

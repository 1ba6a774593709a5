// strip_tools.js: what stands above the tokens: buttons, legend, the small map, and the line about one token.

Object.assign(Strip.prototype, {
  toolbar() {
    const modes = MODES.map(([mode, label]) =>
      h("button", { type: "button", data: { mode }, onclick: () => { this.setMode(mode); remember({ view: mode }); } }, label));
    return h("div", { class: "toolbar" }, h("span", { class: "segmented", role: "group", "aria-label": "colour by" }, modes),
      h("button", { type: "button", class: "quiet", onclick: () => this.nextTrained() },
        "next trained span", h("small", {}, ` ${num(this.tokens.spans.length)}`), h("kbd", {}, "t")),
      h("button", { type: "button", class: "quiet", disabled: this.low === 0, onclick: () => this.nextLow(),
        title: "trained tokens that the policy gave less than 10 %" },
        "next low-probability token", h("small", {}, ` ${num(this.low)}`), h("kbd", {}, "l")));
  },

  legend() {
    this.legendNode = h("div", { class: "striplegend legend" });
    return this.legendNode;
  },

  drawLegend() {
    const item = (name, text) => h("span", {}, h("i", { class: "sw " + name }), text);
    const trained = this.tokens.spans.reduce((sum, [a, b]) => sum + b - a, 0);
    const items = [];
    if (this.mode === "heat") {
      items.push(h("span", {}, "probability of a trained token"), h("span", { class: "ramp" }, "100" + THIN + "%",
        ["h0", "h1", "h2", "h3", "h4", "h5", "h6", "h7"].map((c) => h("i", { class: "sw " + c })), "<" + THIN + "1" + THIN + "%"));
    } else if (this.mode === "version") {
      items.push(...this.versions.map((v, i) => item("v" + (i % 6), v === "null" ? "version unknown" : "policy " + v)));
      if (!this.versions.length) items.push(h("span", {}, "no policy versions recorded"));
    } else items.push(item("t", `trained ${num(trained)}`));
    items.push(item("c", `context ${num(this.n - trained)}`));
    if (this.vocab && this.mode !== "edges") items.push(item("s", "template token"));
    if (!this.vocab) items.push(h("span", { class: "warn" }, "no vocab.json: tokens are shown by their ids"));
    this.legendNode.replaceChildren(...items);
  },

  makeInfo() {
    const names = ["position", "id", "text", "logprob", "policy", "call"];
    const cells = Object.fromEntries(names.map((name) => [name, h("output", {}, "–")]));
    const node = h("dl", { class: "tokeninfo", "aria-live": "polite" },
      names.map((name) => h("div", { class: "ti-" + name }, h("dt", {}, name), h("dd", {}, cells[name]))));
    const show = (i) => {
      const { ids, mask, logprobs } = this.tokens;
      const raw = this.vocab ? this.vocab.get(ids[i]) : undefined;
      const version = this.versionAt(i);
      const id = this.callAt(i);
      const call = id ? this.calls.get(id) : null;
      const values = {
        position: num(i), id: String(ids[i]), text: raw === undefined ? "not in vocab.json" : JSON.stringify(raw),
        logprob: mask[i] ? `${fixed(logprobs[i], 4)} · ${percent(Math.exp(logprobs[i]), 1)}` : "context",
        policy: version === null ? "–" : String(version),
        call: id ? (call && call.index !== null && call.index !== undefined ? `${call.index} · ${id}` : id) : "–",
      };
      for (const name of names) cells[name].textContent = visible(values[name]);
      cells.text.title = values.text;
      cells.call.title = values.call;
    };
    return { node, show };
  },

  listen() {
    let frame = 0;
    this.box.addEventListener("pointermove", (event) => {
      if (frame || this.pinned) return;
      frame = requestAnimationFrame(() => {
        frame = 0;
        const i = this.tokenAt(event.clientX, event.clientY);
        if (i >= 0 && i !== this.cursor) this.mark(i);
      });
    });
    this.box.addEventListener("click", (event) => {
      const i = this.tokenAt(event.clientX, event.clientY);
      const same = this.pinned && i === this.cursor;
      this.pinned = i >= 0 && !same;
      if (i >= 0) this.mark(i);
      remember({ token: this.pinned ? i : null });
    });
    this.box.addEventListener("focus", () => { if (this.cursor < 0 && this.n) this.mark(this.tokens.spans[0]?.[0] ?? 0); });
    this.box.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      this.goto(Math.min(this.n - 1, Math.max(0, this.cursor + step)));
    });
    this.box.addEventListener("scroll", () => this.drawWindow(), { passive: true });
    this.map.addEventListener("pointerdown", (event) => {
      const rect = this.map.getBoundingClientRect();
      this.goto(Math.min(this.n - 1, Math.floor(((event.clientX - rect.left) / rect.width) * this.n)));
    });
    new ResizeObserver(() => this.drawMap()).observe(this.map);
  },

  // One column of pixels stands for n / width tokens: the part that is trained, or the least likely trained token.
  drawMap() {
    const width = Math.round(this.map.clientWidth * devicePixelRatio);
    const height = Math.round(this.map.clientHeight * devicePixelRatio);
    if (!width || !this.n) return;
    this.map.width = width;
    this.map.height = height;
    const paint = this.map.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    const colour = style.getPropertyValue(this.mode === "heat" ? "--hot" : "--deep");
    const { mask, logprobs } = this.tokens;
    for (let x = 0; x < width; x++) {
      const a = Math.floor((x * this.n) / width);
      const b = Math.max(a + 1, Math.floor(((x + 1) * this.n) / width));
      let trained = 0;
      let least = 0;
      for (let i = a; i < b; i++) if (mask[i]) { trained++; least = Math.min(least, logprobs[i]); }
      if (!trained) continue;
      const heat = this.mode === "heat";
      paint.fillStyle = colour;
      paint.globalAlpha = heat ? Math.min(1, 0.08 - least / 6) : 0.25 + (0.65 * trained) / (b - a);
      const tall = heat ? height * Math.min(1, 0.15 - least / 6) : height;
      paint.fillRect(x, height - tall, 1, tall);
    }
    paint.globalAlpha = 0.55;
    paint.fillStyle = style.getPropertyValue("--ink");
    for (const start of this.trace.call_starts) paint.fillRect(Math.round((start * width) / this.n), 0, 1, height * 0.3);
    this.drawWindow();
  },

  drawWindow() {
    if (!this.chunks.length) return;
    const at = (y) => {
      const chunk = this.chunks.find((c) => c.node.offsetTop + c.node.offsetHeight >= y) || this.chunks.at(-1);
      const inside = Math.max(0, Math.min(1, (y - chunk.node.offsetTop) / (chunk.node.offsetHeight || 1)));
      return (chunk.a + (chunk.b - chunk.a) * inside) / this.n;
    };
    const from = at(this.box.scrollTop);
    const to = at(this.box.scrollTop + this.box.clientHeight);
    this.window.style.setProperty("left", (100 * from).toFixed(2) + "%");
    this.window.style.setProperty("width", Math.max(0.4, 100 * (to - from)).toFixed(2) + "%");
  },
});

async function stripOf(trace, calls) {
  if (trace.problem) return h("p", { class: "check bad", role: "alert" }, h("b", {}, "⚠"), `tokens refused: ${trace.problem}`);
  if (trace.block === null || !trace.length) return h("p", { class: "dim" }, "this trace holds no tokens");
  const [tokens, texts] = await Promise.all([tokensOf(trace.block, trace.length), vocab()]);
  activeStrip = new Strip(trace, calls, tokens, texts);
  return activeStrip.node;
}

// strip.js: a trace as running text. Chunks of about 400 tokens keep layout local (content-visibility); neighbours of equal
// tint share one text node, and the token under the pointer is found from the caret position.

const CHUNK = 400;
const LOW = Math.log(0.1);
const HEAT = [0.02, 0.11, 0.36, 0.7, 1.2, 2.3, 4.6]; // −logprob: p above 98, 90, 70, 50, 30, 10, 1 %
const MODES = [["train", "trained"], ["heat", "logprob"], ["version", "policy"], ["edges", "tokens"]];
const SPECIAL = /^<[|｜][^\n]{1,60}[|｜]>$|^<\/?(s|bos|eos|pad|unk|start_of_turn|end_of_turn)>$|^\[\/?[A-Z_]{3,20}\]$/;
const MARKED = /([\n\t])/;

// The newest strip answers the keys; a closed one lets go of its arrays.
let activeStrip = null;

class Strip {
  constructor(trace, calls, tokens, vocabMap) {
    Object.assign(this, { trace, tokens, vocab: vocabMap, n: trace.length, cursor: -1, pinned: false });
    this.calls = new Map(calls.map((call) => [call.call_id, call]));
    this.shown = new Map();
    this.versions = [...new Set(trace.policy_spans.map((s) => String(s.version)))];
    this.low = this.countLow();
    this.box = h("div", { class: "strip", tabindex: "0", role: "region", "aria-label": "tokens of the trace" });
    this.map = h("canvas", { class: "minimap", "aria-hidden": "true" });
    this.window = h("i", { class: "mapwindow" });
    this.info = this.makeInfo();
    this.node = h("div", { class: "stripbox" }, this.toolbar(), this.legend(),
      h("div", { class: "maprow" }, this.map, this.window), this.info.node, this.box);
    this.listen();
    this.setMode(address().view || "train");
  }

  countLow() {
    let count = 0;
    for (let i = 0; i < this.n; i++) if (this.tokens.mask[i] && this.tokens.logprobs[i] < LOW) count++;
    return count;
  }

  // --- text of a token ---

  text(id) {
    let text = this.shown.get(id);
    if (text === undefined) {
      const raw = this.vocab ? this.vocab.get(id) : undefined;
      text = raw ? visible(raw) : this.vocab ? `‹${id}›` : id + " ";
      this.shown.set(id, text);
    }
    return text;
  }

  special(id) {
    return this.vocab !== null && SPECIAL.test(this.vocab.get(id) || "");
  }

  versionAt(i) {
    const span = this.trace.policy_spans.find((s) => s.start <= i && i < s.end);
    return span ? span.version : null;
  }

  callAt(i) {
    const { call_starts: starts, call_lens: lens, call_ids: ids } = this.trace;
    for (let k = starts.length - 1; k >= 0; k--) if (starts[k] <= i && i < starts[k] + lens[k]) return ids[k];
    return null;
  }

  tint(i) {
    const trained = this.tokens.mask[i] === 1;
    if (this.mode === "edges") return (trained ? "t" : "c") + " e" + (i % 2);
    if (!trained) return this.special(this.tokens.ids[i]) ? "s" : "c";
    if (this.mode === "heat") {
      const surprise = -this.tokens.logprobs[i];
      let level = 0;
      while (level < HEAT.length && surprise > HEAT[level]) level++;
      return "h" + level;
    }
    if (this.mode === "version") return "v" + (this.versions.indexOf(String(this.versionAt(i))) % 6);
    return "t";
  }

  // --- building ---

  setMode(mode) {
    this.mode = MODES.some(([m]) => m === mode) ? mode : "train";
    for (const button of this.node.querySelectorAll("[data-mode]")) {
      button.setAttribute("aria-pressed", String(button.dataset.mode === this.mode));
    }
    const started = performance.now();
    const top = this.chunks ? this.box.scrollTop : 0;
    this.build();
    this.box.scrollTop = top;
    document.documentElement.dataset.stripMs = (performance.now() - started).toFixed(1);
    this.node.dataset.mode = this.mode;
    this.drawLegend();
    this.drawMap();
    if (this.cursor >= 0) this.mark(this.cursor);
  }

  build() {
    const starts = new Map(this.trace.call_starts.map((start, k) => [start, k]));
    this.chunks = [];
    const fragment = document.createDocumentFragment();
    for (let a = 0; a < this.n; ) {
      const b = this.cut(a);
      const chunk = this.chunk(a, b, starts);
      this.chunks.push(chunk);
      fragment.append(chunk.node);
      a = b;
    }
    this.box.replaceChildren(fragment);
  }

  // The end of the chunk that starts at a: after a line break if there is one near.
  cut(a) {
    const end = a + CHUNK;
    if (end >= this.n) return this.n;
    for (let d = 0; d < 120; d++) {
      if (this.text(this.tokens.ids[end - d - 1]).endsWith("\n")) return end - d;
      if (end + d < this.n && this.text(this.tokens.ids[end + d - 1]).endsWith("\n")) return end + d;
    }
    return end;
  }

  chunk(a, b, starts) {
    const node = document.createElement("div");
    node.className = "chunk";
    const chunk = { node, a, b, pieces: [], offsets: new Uint32Array(b - a + 1) };
    let at = 0;
    let run = "";
    let runTint = null;
    let lines = 1;
    const flush = () => {
      if (run) lines += this.place(chunk, run, runTint, at - run.length);
      run = "";
    };
    for (let i = a; i < b; i++) {
      const call = starts.get(i);
      const tint = this.tint(i);
      if (call !== undefined || tint !== runTint) {
        flush();
        runTint = tint;
        if (call !== undefined) node.append(this.pill(call));
      }
      const text = this.text(this.tokens.ids[i]);
      chunk.offsets[i - a] = at;
      at += text.length;
      run += text;
    }
    flush();
    chunk.offsets[b - a] = at;
    const height = Math.round((lines + at / 120) * 22);
    node.style.setProperty("contain-intrinsic-block-size", `auto ${height}px`);
    node.chunk = chunk;
    return chunk;
  }

  // Append one run of equal tint; returns its line breaks.
  place(chunk, run, tint, at) {
    let parent = chunk.node;
    if (tint !== "c") {
      parent = document.createElement("span");
      parent.className = tint;
      chunk.node.append(parent);
    }
    let breaks = 0;
    for (const part of run.includes("\n") || run.includes("\t") ? run.split(MARKED) : [run]) {
      if (!part) continue;
      const node = document.createTextNode(part);
      if (part === "\n" || part === "\t") {
        const mark = document.createElement("i");
        mark.className = part === "\n" ? "nl" : "tab";
        mark.append(node);
        parent.append(mark);
        if (part === "\n") breaks++;
      } else parent.append(node);
      node.piece = chunk.pieces.length;
      chunk.pieces.push({ node, at });
      at += part.length;
    }
    return breaks;
  }

  pill(k) {
    const call = this.calls.get(this.trace.call_ids[k]);
    const label = call && call.index !== null && call.index !== undefined ? `call ${call.index}` : `call ${k}`;
    return h("b", { class: "cut", title: this.trace.call_ids[k] }, label);
  }

  // --- finding ---

  chunkOf(i) {
    let low = 0;
    let high = this.chunks.length - 1;
    while (low < high) {
      const mid = (low + high) >> 1;
      if (this.chunks[mid].b <= i) low = mid + 1;
      else high = mid;
    }
    return this.chunks[low];
  }

  rangeOf(i) {
    const chunk = this.chunkOf(i);
    const from = chunk.offsets[i - chunk.a];
    const to = chunk.offsets[i - chunk.a + 1];
    const range = document.createRange();
    const place = (offset, end) => {
      let k = 0;
      let high = chunk.pieces.length - 1;
      while (k < high) {
        const mid = (k + high + 1) >> 1;
        if (chunk.pieces[mid].at < offset || (!end && chunk.pieces[mid].at === offset)) k = mid;
        else high = mid - 1;
      }
      const piece = chunk.pieces[k];
      range[end ? "setEnd" : "setStart"](piece.node, Math.min(offset - piece.at, piece.node.length));
    };
    place(from, false);
    place(to, true);
    return range;
  }

  tokenAt(x, y) {
    let node;
    let offset;
    if (document.caretPositionFromPoint) {
      const caret = document.caretPositionFromPoint(x, y);
      if (!caret) return -1;
      ({ offsetNode: node, offset } = caret);
    } else {
      const range = document.caretRangeFromPoint(x, y);
      if (!range) return -1;
      ({ startContainer: node, startOffset: offset } = range);
    }
    if (node.nodeType !== Node.TEXT_NODE || node.piece === undefined) return -1;
    const chunk = node.parentNode.closest(".chunk").chunk;
    if (offset > 0 && this.covers(node, offset - 1, x, y)) offset -= 1; // the caret rounds to the nearer edge
    else if (offset >= node.length || !this.covers(node, offset, x, y)) return -1;
    const at = chunk.pieces[node.piece].at + offset;
    let low = 0;
    let high = chunk.b - chunk.a - 1;
    while (low < high) {
      const mid = (low + high + 1) >> 1;
      if (chunk.offsets[mid] <= at) low = mid;
      else high = mid - 1;
    }
    return chunk.a + low;
  }

  covers(node, offset, x, y) {
    const range = document.createRange();
    range.setStart(node, offset);
    range.setEnd(node, offset + 1);
    for (const r of range.getClientRects()) {
      if (x >= r.left - 1 && x <= r.right + 1 && y >= r.top - 3 && y <= r.bottom + 3) return true;
    }
    return false;
  }

  // --- showing one token ---

  mark(i) {
    this.cursor = i;
    if (globalThis.Highlight && CSS.highlights) CSS.highlights.set("token", new Highlight(this.rangeOf(i)));
    this.info.show(i);
  }

  goto(i) {
    if (!(i >= 0 && i < this.n)) return;
    this.pinned = true;
    this.mark(i);
    const centre = (left) => {
      const chunk = this.chunkOf(i).node;
      const box = this.box.getBoundingClientRect();
      let rect = this.rangeOf(i).getBoundingClientRect();
      if (!rect.height) rect = chunk.getBoundingClientRect();
      this.box.scrollTop += rect.top - box.top - box.height / 2;
      if (left > 0) requestAnimationFrame(() => centre(left - 1)); // chunks take their true height when they come near
    };
    centre(3);
    remember({ token: i });
  }

  nextTrained() {
    const spans = this.tokens.spans;
    if (spans.length) this.goto((spans.find(([start]) => start > this.cursor) || spans[0])[0]);
  }

  nextLow() {
    for (let k = 1; k <= this.n; k++) {
      const i = (Math.max(this.cursor, 0) + k) % this.n;
      if (this.tokens.mask[i] && this.tokens.logprobs[i] < LOW) return this.goto(i);
    }
    return undefined;
  }
}

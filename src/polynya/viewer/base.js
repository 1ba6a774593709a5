// base.js: elements, numbers, and the data blocks of this file. Text enters the page only as text nodes.

const INDEX = JSON.parse(document.getElementById("index").textContent);
const THIN = "\u2009";

function h(tag, props, ...kids) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") node.className = value;
    else if (key === "css") for (const [name, v] of Object.entries(value)) node.style.setProperty(name, v);
    else if (key === "data") for (const [name, v] of Object.entries(value)) node.dataset[name] = v;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  add(node, kids);
  return node;
}

function add(node, kids) {
  for (const kid of kids.flat(Infinity)) {
    if (kid === null || kid === undefined || kid === false) continue;
    node.append(kid instanceof Node ? kid : visible(String(kid)));
  }
  return node;
}

// Characters that would hide or reorder text are shown by their number.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
function visible(text) {
  return text.replace(HIDDEN, (c) => {
    const code = c.codePointAt(0);
    if (code < 32) return String.fromCharCode(0x2400 + code);
    return "‹U+" + code.toString(16).toUpperCase().padStart(4, "0") + "›";
  });
}

// A table without inherited names: text of a run is looked up in it.
const table = (entries) => Object.assign(Object.create(null), entries);

// --- numbers -------------------------------------------------------------------------------------------------------

const INT = new Intl.NumberFormat("en-US");
const num = (x) => (x === null || x === undefined ? "–" : INT.format(x));
const fixed = (x, digits) => (Number.isFinite(x) ? x.toFixed(digits).replace("-", "−") : "–");
const reward = (x) => (x === null || x === undefined ? "null" : String(+(+x).toFixed(3)).replace("-", "−"));
const percent = (part, whole) => (whole ? fixed((100 * part) / whole, 1) + THIN + "%" : "–");
const plural = (n, word) => `${num(n)} ${word}${n === 1 ? "" : "s"}`;

function duration(s) {
  if (!Number.isFinite(s)) return "–";
  if (s < 10) return s.toFixed(2) + THIN + "s";
  if (s < 100) return s.toFixed(1) + THIN + "s";
  const m = Math.floor(s / 60);
  if (m < 60) return `${m}${THIN}m ${String(Math.round(s % 60)).padStart(2, "0")}${THIN}s`;
  return `${Math.floor(m / 60)}${THIN}h ${String(m % 60).padStart(2, "0")}${THIN}m`;
}

function bytes(n) {
  for (const unit of ["B", "KB", "MB"]) {
    if (n < 1024) return (unit === "B" ? n : n.toFixed(1)) + THIN + unit;
    n /= 1024;
  }
  return n.toFixed(1) + THIN + "GB";
}

function when(t) {
  if (typeof t === "string" && t) {
    const parsed = Date.parse(t);
    if (Number.isNaN(parsed)) return t;
    t = parsed / 1000;
  }
  if (!Number.isFinite(t) || t <= 0) return null;
  return new Date(t * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC";
}

const words = (name) => String(name).replace(/_/g, " ");
const short = (text, n) => (text.length > n ? text.slice(0, n - 1) + "…" : text);
const sumOf = (object) => Object.values(object || {}).reduce((a, b) => a + b, 0);

// --- blocks --------------------------------------------------------------------------------------------------------

async function bytesOf(block) {
  const text = document.getElementById("b" + block).textContent;
  let packed;
  if (Uint8Array.fromBase64) packed = Uint8Array.fromBase64(text);
  else {
    const raw = atob(text);
    packed = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) packed[i] = raw.charCodeAt(i);
  }
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function jsonOf(block) {
  return JSON.parse(new TextDecoder().decode(await bytesOf(block)));
}

// The words of pack.pack_tokens: [runs, start, end, …, ids, logprobs of the trained tokens], in four byte planes.
async function tokensOf(block, length) {
  const planes = await bytesOf(block);
  const n = planes.length / 4;
  const mixed = new Uint8Array(planes.length);
  for (let k = 0; k < 4; k++) for (let i = 0, p = k * n; i < n; i++) mixed[i * 4 + k] = planes[p + i];
  const wordsView = new Int32Array(mixed.buffer);
  const runs = wordsView[0];
  const spans = [];
  for (let i = 0; i < runs; i++) spans.push([wordsView[1 + 2 * i], wordsView[2 + 2 * i]]);
  const at = 1 + 2 * runs;
  const ids = wordsView.subarray(at, at + length);
  const values = new Float32Array(mixed.buffer, 4 * (at + length));
  const mask = new Uint8Array(length);
  const logprobs = new Float32Array(length);
  let next = 0;
  for (const [start, end] of spans) {
    for (let i = start; i < end; i++) {
      mask[i] = 1;
      logprobs[i] = values[next++];
    }
  }
  return { ids, mask, logprobs, spans };
}

let vocabulary = null;
async function vocab() {
  if (INDEX.vocab === null) return null;
  if (!vocabulary) {
    const [ids, texts] = await jsonOf(INDEX.vocab);
    vocabulary = new Map(ids.map((id, i) => [id, texts[i]]));
  }
  return vocabulary;
}

const details = new Map();
async function detailOf(session) {
  if (session.block === null) return null;
  if (!details.has(session.id)) {
    if (details.size > 8) details.delete(details.keys().next().value);
    details.set(session.id, await jsonOf(session.block));
  }
  return details.get(session.id);
}

// --- the address ---------------------------------------------------------------------------------------------------

function address() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

function hashOf(params) {
  const clean = Object.fromEntries(Object.entries(params).filter(([, v]) => v !== null && v !== undefined && v !== ""));
  return "#" + new URLSearchParams(clean).toString();
}

// Note where the reader is without a new history entry and without drawing again.
function remember(params) {
  history.replaceState(null, "", hashOf({ ...address(), ...params }));
}

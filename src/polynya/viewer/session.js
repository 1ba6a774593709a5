// session.js: the page of one session.

function neighbours(session) {
  const list = visibleSessions();
  const i = list.findIndex((s) => s.id === session.id);
  return [list[i - 1], list[i + 1]];
}

async function sessionPage(session, want) {
  const detail = await detailOf(session);
  const [before, after] = neighbours(session);
  const step = (s, label, key) => s
    ? h("a", { class: "button", href: hashOf({ session: s.id }), title: s.id }, label, h("kbd", {}, key))
    : h("span", { class: "button off" }, label, h("kbd", {}, key));
  const page = h("div", { class: "page" },
    h("nav", { class: "crumbs" }, h("a", { href: "#" }, runName()), h("span", {}, "/"), h("b", {}, session.id),
      h("span", { class: "grow" }), detail ? jumps() : null, step(before, "previous", "k"), step(after, "next", "j")),
    sessionHead(session, detail));
  if (!detail) {
    page.append(h("p", { class: "note" }, leftOutWords(), " Its row in the table, its reward and its ledger are complete."));
    page.append(ledgerOf(session));
    return page;
  }
  const result = detail.result;
  page.append(section("Stages", null, waterfall(session.timings)));
  if (result) page.append(section("Scores", scoreNote(result.scores), scoreCards(result.scores)));
  page.append(section("Calls", callNote(detail.calls), callsPanel(detail)));
  page.append(await tracesSection(session, detail, want));
  page.append(ledgerOf(session));
  page.append(section("Logs", detail.logs.length ? "the ends of the files" : null, logsPanel(detail.logs)));
  return page;
}

// In-page links cannot be addresses: the hash names the session.
function jumps() {
  return h("span", { class: "jumps" }, ["Scores", "Calls", "Traces", "Ledger", "Logs"].map((title) =>
    h("button", { type: "button", onclick: () => jumpTo(title) }, title.toLowerCase())));
}

function jumpTo(title) {
  const found = [...document.querySelectorAll("section.block")].find((s) => s.dataset.title === title);
  if (found) found.scrollIntoView({ block: "start" });
}

function ledgerOf(session) {
  const file = session.ledger_file;
  const own = session.ledger;
  const differ = file && own && (file.captured !== own.captured || file.trained !== own.trained || sumOf(file.excluded) !== sumOf(own.excluded));
  return section("Ledger", "where every sampled token went", differ ? h("p", { class: "check bad", role: "alert" }, h("b", {}, "⚠"),
    `ledger.json says otherwise: ${num(file.captured)} captured, ${num(file.trained)} trained, ${num(sumOf(file.excluded))} excluded`) : null,
  ledgerPanel(own, INDEX.has_traces ? session.trained_in_traces : null, true));
}

function leftOutWords() {
  return `The calls, messages and tokens of this session are not in this file: ${bytes(INDEX.cap)} of details were embedded, ` +
    "sessions with errors first. Render the page again with this session named first, or with a larger bound.";
}

function sessionHead(session, detail) {
  const result = detail && detail.result;
  const p = result ? result.provenance : {};
  const error = result ? result.error : null;
  const flags = result ? Object.entries(result.flags || {}) : [];
  return h("header", { class: "head" },
    h("h1", {}, session.id, badge(session.status)),
    h("div", { class: "bignums" },
      big("reward", reward(session.reward), session.reward === null ? "not scored" : null),
      big("calls", num(session.calls)), big("traces", num(session.traces)),
      big("sampled tokens", num(session.sampled)), big("prompt tokens", num(session.prompt)),
      big("time", duration(session.timings.total))),
    error ? h("div", { class: "errorbox", role: "alert" }, h("b", {}, error.kind),
      h("span", { class: "dim" }, ` at the ${error.boundary || "unknown"} boundary, `,
        error.policy_can_cause ? "the policy can cause it" : "the policy cannot cause it"),
      h("p", {}, error.message), error.fix ? h("p", { class: "dim" }, "fix: " + error.fix) : null) : null,
    session.status === "open" ? h("p", { class: "note" }, "This session has no result yet; what its files hold so far is shown.") : null,
    facts([["task", session.task], ["sample", num(session.sample)], ["attempt", num(session.attempt)],
      ["harness", [p.harness, p.harness_version].filter(Boolean).join(" ")], ["runtime", p.runtime], ["model", p.model],
      ["engine", [p.engine, p.engine_build].filter(Boolean).join(" ")], ["logprobs", p.logprob_kind],
      ["exit code", result ? result.exit_code : null], ["started", result ? when(result.started_at) : null],
      ["sampling", p.sampling && Object.entries(p.sampling).map(([k, v]) => `${k} ${typeof v === "object" ? JSON.stringify(v) : v}`).join(" · ")],
      ["flags", flags.map(([k, v]) => `${words(k)} ${v}`).join(" · ")]]),
    detail && detail.instruction ? fold("Instruction", detail.instruction.length < 400, h("pre", { class: "prose" }, detail.instruction)) : null);
}

const big = (name, value, note) =>
  h("div", {}, h("strong", { class: note ? "soft" : null }, value), h("span", {}, name), note ? h("em", {}, note) : null);

// --- stages and scores ---------------------------------------------------------------------------------------------

function waterfall(timings) {
  const known = STAGES.filter((stage) => timings[stage] !== undefined);
  if (!known.length) return h("p", { class: "dim" }, "not yet: no timings");
  const whole = known.reduce((sum, stage) => sum + timings[stage], 0) || 1;
  let at = 0;
  return h("div", { class: "waterfall" }, known.map((stage) => {
    const left = (100 * at) / whole;
    at += timings[stage];
    return h("div", { class: "wrow" }, h("span", {}, stage), h("div", {},
      timings[stage] > 0 && h("i", { class: "st-" + stage, css: { left: left.toFixed(3) + "%", width: `max(2px, ${((100 * timings[stage]) / whole).toFixed(3)}%)` } })),
    h("span", { class: "n" }, duration(timings[stage])));
  }));
}

function scoreNote(scores) {
  return scores.length ? plural(scores.length, "evaluator") : null;
}

function scoreCards(scores) {
  if (!scores.length) return h("p", { class: "dim" }, "no evaluator gave a verdict");
  return h("div", { class: "scores" }, scores.map((score) => {
    const tests = (names, word, mark) => names.length ? fold(
      h("span", {}, h("b", { class: mark }, mark === "yes" ? "✓" : "✕"), ` ${num(names.length)} ${word}`), names.length <= 12,
      h("ul", { class: "tests" }, names.slice(0, 500).map((name) => h("li", {}, name)),
        names.length > 500 ? h("li", { class: "dim" }, `… and ${num(names.length - 500)} more`) : null)) : null;
    return h("article", { class: "score" },
      h("header", {}, h("strong", { class: score.value === null ? "soft" : null }, reward(score.value)),
        h("div", {}, h("b", {}, score.label || score.name), h("span", { class: "dim" },
          ` ${score.label ? score.name + " · " : ""}weight ${+score.weight.toFixed(3)} · ${duration(score.seconds)}`))),
      score.error ? h("div", { class: "errorbox" }, h("b", {}, score.error.kind), h("p", {}, score.error.message)) : null,
      tests(score.failed, "failed", "no"), tests(score.passed, "passed", "yes"),
      score.detail ? fold("output", score.value !== 1 && score.detail.length < 3000, h("pre", {}, score.detail)) : null);
  }));
}

// --- calls ---------------------------------------------------------------------------------------------------------

function callTimes(calls) {
  const timed = calls.filter((c) => Number.isFinite(c.t_start) && c.t_start > 0);
  if (!timed.length) return null;
  const endOf = (c) => (Number.isFinite(c.t_end) && c.t_end >= c.t_start ? c.t_end : c.t_start);
  const from = Math.min(...timed.map((c) => c.t_start));
  const to = Math.max(...timed.map(endOf), from + 0.001);
  let busy = 0;
  let edge = from;
  for (const c of [...timed].sort((a, b) => a.t_start - b.t_start)) {
    busy += Math.max(0, endOf(c) - Math.max(edge, c.t_start));
    edge = Math.max(edge, endOf(c));
  }
  return { timed, from, to, busy, endOf };
}

function callNote(calls) {
  const times = callTimes(calls);
  if (!times) return calls.length ? plural(calls.length, "call") : null;
  return `${plural(calls.length, "call")} · model ${duration(times.busy)} · harness and tools ${duration(times.to - times.from - times.busy)}`;
}

function callClass(call) {
  if (call.outcome && call.outcome !== "ok") return "k-" + call.outcome;
  return call.exclusion ? "k-excluded" : "k-ok";
}

function callsPanel(detail) {
  const { calls } = detail;
  if (!calls.length) return h("p", { class: "dim" }, INDEX.has_calls ? "no call was made" : "not yet: calls.parquet is not complete");
  const holder = h("div", { class: "calls" });
  const times = callTimes(calls);
  if (times) holder.append(timeline(times, (call) => openCall(holder, call)));
  const columns = ["", "start", "time", "prompt", "sampled", "tok/s", "finish", "trained", "extends", "lane", "dialect"];
  const numeric = new Set([0, 1, 2, 3, 4, 5]);
  const number = new Map(calls.map((call) => [call.call_id, call.index]));
  holder.append(h("div", { class: "scroll" }, h("table", { class: "grid" },
    h("thead", {}, h("tr", {}, columns.map((c, i) => h("th", { class: numeric.has(i) ? "n" : null }, c)))),
    h("tbody", {}, calls.map((call) => callRow(call, times, number, holder))))));
  return holder;
}

function timeline(times, open) {
  const whole = times.to - times.from;
  const tracks = [];
  const place = (call) => {
    let k = tracks.findIndex((t) => t.lane === call.lane && t.end <= call.t_start + 1e-6);
    if (k < 0) k = tracks.push({ lane: call.lane, calls: [] }) - 1;
    tracks[k].end = times.endOf(call);
    tracks[k].calls.push(call);
  };
  [...times.timed].sort((a, b) => a.t_start - b.t_start).forEach(place);
  return h("div", { class: "timeline" }, tracks.map((track) => h("div", { class: "wrow" },
    h("span", {}, track.lane || "calls"), h("div", {}, track.calls.map((call) => h("button", {
      type: "button", class: callClass(call),
      title: `call ${call.index}: ${duration(times.endOf(call) - call.t_start)}, ${num(call.sampled_len)} sampled, ${call.finish_reason || call.outcome || ""}` +
        (call.exclusion ? `, excluded: ${words(call.exclusion)}` : ""),
      css: { left: ((100 * (call.t_start - times.from)) / whole).toFixed(3) + "%",
        width: `max(3px, calc(${((100 * (times.endOf(call) - call.t_start)) / whole).toFixed(3)}% - 1px))` },
      onclick: () => open(call),
    }))), h("span", { class: "n" }))),
  h("div", { class: "wrow axis" }, h("span", {}), h("div", {}, h("em", {}, "0"), h("em", {}, duration(whole / 2)), h("em", {}, duration(whole))), h("span", {})));
}

function callRow(call, times, number, holder) {
  const seconds = Number.isFinite(call.t_end) && Number.isFinite(call.t_start) ? call.t_end - call.t_start : NaN;
  const state = call.outcome && call.outcome !== "ok" ? words(call.outcome) + (call.exclusion && call.exclusion !== call.outcome ? ", " + words(call.exclusion) : "")
    : call.exclusion ? words(call.exclusion) : call.trainable === false ? "no" : "✓";
  const base = call.base_call_id;
  const known = base !== null && number.get(base) !== undefined && number.get(base) !== null;
  return h("tr", { class: "open " + callClass(call), tabindex: "0", data: { call: call.call_id }, title: call.call_id,
    onclick: () => openCall(holder, call), onkeydown: (e) => { if (e.key === "Enter") openCall(holder, call); } },
  h("td", { class: "n dim" }, num(call.index)),
  h("td", { class: "n" }, times && Number.isFinite(call.t_start) ? "+" + duration(call.t_start - times.from) : "–"),
  h("td", { class: "n" }, duration(seconds)), h("td", { class: "n" }, num(call.prompt_len)), h("td", { class: "n" }, num(call.sampled_len)),
  h("td", { class: "n dim" }, seconds > 0 && call.sampled_len ? fixed(call.sampled_len / seconds, 1) : "–"),
  h("td", {}, call.finish_reason || "–"), h("td", { class: "state" }, state),
  h("td", { class: "dim" }, base ? `${known ? "call " + number.get(base) : base} at ${num(call.base_keep)}` : "starts a chain"),
  h("td", {}, call.lane || "–"), h("td", { class: "dim" }, words(call.dialect || "–")));
}

function openCall(holder, call) {
  const row = [...holder.querySelectorAll("tr[data-call]")].find((r) => r.dataset.call === call.call_id);
  if (!row) return;
  if (row.nextSibling && row.nextSibling.className === "inner") { row.nextSibling.remove(); return; }
  const text = (title, value) => value ? h("div", {}, h("h4", {}, title), h("pre", {}, pretty(value))) : null;
  row.after(h("tr", { class: "inner" }, h("td", { colspan: "11" },
    facts([["call", call.call_id], ["model", call.model], ["attempt", num(call.attempt)], ["parent", call.parent_call_id]]),
    call.error ? h("div", { class: "errorbox" }, h("p", {}, call.error)) : null,
    h("div", { class: "wires" }, text("request: new messages", call.request), text("reply", call.reply)),
    h("div", { class: "wires" }, text("sampling", call.sampling), call.flags && call.flags !== "{}" ? text("flags", call.flags) : null))));
  row.scrollIntoView({ block: "nearest" });
}

// --- traces and messages -------------------------------------------------------------------------------------------

async function tracesSection(session, detail, want) {
  const { traces } = detail;
  activeStrip = null;
  if (!traces.length) return section("Traces", null, h("p", { class: "dim" }, INDEX.has_traces ? "no trace: nothing of this session is trained" : "not yet: traces.parquet is not complete"));
  const current = traces.find((trace) => trace.trace_id === want.trace) || traces[0];
  const tabs = h("div", { class: "tabs", role: "tablist" }, traces.map((trace) => h("a", {
    role: "tab", "aria-selected": String(trace === current), title: trace.trace_id,
    href: hashOf({ session: session.id, trace: trace.trace_id }),
  }, h("b", {}, `${trace.lane || "trace"} ${trace.segment ?? ""}`), h("span", {}, `${num(trace.length)} tokens · ${num(trace.trained)} trained`))));
  const about = [plural(current.num_turns ?? 0, "turn"), `finish ${current.finish_reason || "–"}`, current.truncated ? "truncated" : null,
    `prompt ${num(current.prompt_len)}`, current.trace_id].filter(Boolean).join(" · ");
  return section("Traces", about, tabs, await stripOf(current, detail.calls), messagesPanel(current));
}

function messagesPanel(trace) {
  let messages;
  try {
    messages = JSON.parse(trace.messages || "null");
  } catch {
    return fold("Messages", false, h("pre", {}, trace.messages));
  }
  if (!Array.isArray(messages)) return h("p", { class: "dim" }, "no messages recorded for this trace");
  const list = h("div", { class: "messages" });
  const panel = fold(`Messages (${messages.length})`, false, list);
  panel.classList.add("messagesfold");
  panel.addEventListener("toggle", () => { if (panel.open && !list.firstChild) list.append(...messages.map(message)); });
  if (trace.tools && trace.tools !== "[]") list.before(fold("Tool definitions", false, h("pre", {}, pretty(trace.tools))));
  return panel;
}

function textOf(content) {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return JSON.stringify(content, null, 2);
  return content.map((part) => typeof part === "string" ? part : part && typeof part.text === "string" ? part.text
    : `[${(part && part.type) || "part"}] ${short(JSON.stringify(part) ?? "", 2000)}`).join("\n");
}

function message(raw) {
  const m = raw && typeof raw === "object" ? raw : { role: "unknown", content: String(raw) };
  const role = ["system", "developer", "user", "assistant", "tool"].includes(m.role) ? m.role : "other";
  const text = textOf(m.content ?? m.text);
  const reasoning = textOf(m.reasoning_content ?? m.reasoning);
  const calls = Array.isArray(m.tool_calls) ? m.tool_calls : [];
  const first = text.trim().split("\n")[0] || (calls.length ? calls.map((c) => (c.function || c).name).join(", ") : "");
  return h("details", { class: "msg r-" + role, open: role !== "system" && role !== "developer" && text.length < 6000 },
    h("summary", {}, h("b", {}, String(m.role ?? "unknown")), h("span", {}, short(first, 160)), h("em", {}, m.tool_call_id || m.name || "")),
    reasoning ? h("div", { class: "reasoning" }, h("pre", { class: "prose" }, reasoning)) : null,
    text ? h("pre", { class: role === "tool" ? null : "prose" }, text) : null,
    calls.map((c) => {
      const fn = (c && c.function) || c || {};
      return h("div", { class: "toolcall" }, h("b", {}, String(fn.name ?? "tool")), h("em", {}, (c && c.id) || ""),
        h("pre", {}, typeof fn.arguments === "string" ? pretty(fn.arguments) : JSON.stringify(fn.arguments, null, 2) ?? ""));
    }));
}

function logsPanel(logs) {
  if (!logs.length) return h("p", { class: "dim" }, "no log files");
  return h("div", {}, logs.map((log) => fold(
    h("span", {}, h("b", {}, log.name), h("span", { class: "dim" }, ` ${log.path} · ${bytes(log.size)}` +
      (log.shown < log.size ? `, the last ${bytes(log.shown)} shown` : ""))), logs.length === 1,
    h("pre", {}, log.text || "(empty)"))));
}

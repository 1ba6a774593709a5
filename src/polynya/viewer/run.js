// run.js: the page of the run: header, ledger, sessions by task.

const view = { filter: "", status: null, sort: null, down: false, grouped: true, open: new Map(), selected: null };
const COLUMNS = [
  ["session", (s) => s.id, false], ["status", (s) => STATUSES.indexOf(s.status), false], ["reward", (s) => s.reward, true],
  ["calls", (s) => s.calls, true], ["traces", (s) => s.traces, true], ["sampled", (s) => s.sampled, true],
  ["trained", (s) => (s.ledger ? s.ledger.trained : null), true], ["time", (s) => s.timings.total ?? null, false], ["error", (s) => s.error && s.error.kind, false],
];
const WIDTHS = ["15rem", "8.5rem", "4.6rem", "4rem", "4.4rem", "5.4rem", "5.4rem", "12.5rem", "auto"];
INDEX.tasks = table(INDEX.tasks);
for (const session of INDEX.sessions) {
  const error = session.error ? session.error.kind + " " + session.error.message : "";
  session.search = `${session.id} ${session.task} ${session.status} ${words(session.status)} ${error}`.toLowerCase();
  if (session.ledger) session.excluded = sumOf(session.ledger.excluded);
}
const LONGEST = Math.max(0, ...INDEX.sessions.map((s) => STAGES.reduce((sum, st) => sum + (s.timings[st] || 0), 0)));
const rewardsOf = INDEX.sessions.map((s) => s.reward).filter((r) => r !== null);
const RANGE = rewardsOf.length ? [Math.min(0, ...rewardsOf), Math.max(...rewardsOf)] : [0, 1];

const runName = () => String(INDEX.run.run_id || INDEX.run_dir || "run");

function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1; // unknown goes last in both directions
  if (b === null || b === undefined) return -1;
  const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  return view.down ? -order : order;
}

function filtered() {
  const wanted = view.filter.toLowerCase().split(/\s+/).filter(Boolean);
  const list = INDEX.sessions.filter((s) => (!view.status || s.status === view.status) && wanted.every((w) => s.search.includes(w)));
  if (view.sort === null) return list;
  const value = COLUMNS[view.sort][1];
  return list.map((s, i) => [s, i]).sort((a, b) => compare(value(a[0]), value(b[0])) || a[1] - b[1]).map(([s]) => s);
}

function groups(list) {
  const found = new Map();
  for (const session of list) {
    if (!found.has(session.task)) found.set(session.task, []);
    found.get(session.task).push(session);
  }
  if (view.sort === null) for (const members of found.values()) members.sort((a, b) => (a.sample ?? 0) - (b.sample ?? 0));
  return [...found];
}

// In the order in which the table shows them: what j and k step through.
function visibleSessions() {
  return view.grouped ? groups(filtered()).flatMap(([, members]) => members) : filtered();
}

// --- header --------------------------------------------------------------------------------------------------------

function value(x) {
  if (x === null || x === undefined) return null;
  return typeof x === "object" ? Object.entries(x).map(([k, v]) => `${k} ${typeof v === "object" ? JSON.stringify(v) : v}`).join(" · ") : String(x);
}

function runFacts() {
  const { run } = INDEX;
  const sources = [...INDEX.provenance, run.provenance || {}, typeof run.engine === "object" && run.engine ? run.engine : {}];
  const all = (name) => [...new Set(sources.map((p) => p[name]).filter(Boolean).map(value))];
  const from = Date.parse(run.started_at) / 1000 || run.started_at;
  const to = Date.parse(run.finished_at) / 1000 || run.finished_at;
  const engines = all("engine");
  if (typeof run.engine === "string") engines.push(run.engine);
  if (!engines.length && run.engine) engines.push(run.engine.name || run.engine.kind || value(run.engine));
  const harness = [...new Set(INDEX.provenance.map((p) => [p.harness, p.harness_version].filter(Boolean).join(" ")).filter(Boolean))];
  if (!harness.length) harness.push(...new Set(Object.values(INDEX.tasks).map((t) => t.harness).filter(Boolean).map(value)));
  const list = (items) => items.slice(0, 4).join(", ") + (items.length > 4 ? ` and ${items.length - 4} more` : "");
  return facts([["model", list(all("model"))], ["engine", list([...new Set(engines.filter(Boolean))])], ["build", list(all("engine_build"))],
    ["harness", list(harness)], ["runtime", list(all("runtime"))], ["logprobs", list(all("logprob_kind"))], ["tool parser", list(all("tool_parser"))],
    ["polynya", list(all("polynya"))], ["started", when(run.started_at)], ["took", to && from ? duration(to - from) : null],
    ["weights", list(all("model_sha256").map((x) => short(x, 13)))], ["chat template", list(all("chat_template_sha256").map((x) => short(x, 13)))],
    ["command", run.command ? h("code", {}, Array.isArray(run.command) ? run.command.join(" ") : String(run.command)) : null]]);
}

function statusCard() {
  const by = new Map();
  for (const s of INDEX.sessions) by.set(s.status, (by.get(s.status) || 0) + 1);
  const asked = Object.values(INDEX.tasks).reduce((sum, t) => sum + (Number.isInteger(t.num_samples) ? t.num_samples : 0), 0);
  const total = INDEX.sessions.length;
  const bar = h("div", { class: "statusbar" }, STATUSES.filter((s) => by.has(s)).map((s) =>
    h("i", { class: "b-" + s, title: `${words(s)}: ${by.get(s)}`, css: { width: ((100 * by.get(s)) / Math.max(asked, total)).toFixed(3) + "%" } })));
  return card("Sessions", h("strong", {}, num(total), asked > total ? h("small", {}, ` of ${num(asked)}`) : null), bar,
    h("ul", { class: "keys" }, STATUSES.filter((s) => by.has(s)).map((s) => h("li", {}, h("button", {
      type: "button", class: "key", "aria-pressed": String(view.status === s),
      onclick: () => { view.status = view.status === s ? null : s; drawRun(); },
    }, h("i", { class: "sw b-" + s }), words(s), h("span", { class: "n" }, num(by.get(s))))))));
}

function rewardCard() {
  const all = spread(INDEX.sessions);
  const byTask = groups(INDEX.sessions).filter(([, m]) => m.length > 1).map(([, m]) => spread(m));
  const flat = byTask.filter((g) => g.flat).length;
  const bins = new Array(12).fill(0);
  for (const r of rewardsOf) bins[Math.min(11, Math.floor((12 * (r - RANGE[0])) / (RANGE[1] - RANGE[0] || 1)))]++;
  const most = Math.max(1, ...bins);
  return card("Mean reward", h("strong", {}, all.n ? fixed(all.mean, 3) : "–", all.n ? h("small", {}, ` ± ${fixed(all.sd, 3)}`) : null),
    all.n ? h("div", { class: "histo", title: `rewards from ${reward(RANGE[0])} to ${reward(RANGE[1])}` }, bins.map((count) =>
      h("i", { title: plural(count, "session"), css: { height: Math.max(count ? 8 : 2, (100 * count) / most) + "%" } }))) : null,
    h("ul", { class: "keys" }, h("li", {}, "scored", h("span", { class: "n" }, num(all.n))),
      h("li", {}, "not scored, in no mean", h("span", { class: "n" }, num(all.unscored))),
      byTask.length ? h("li", {}, "groups with equal rewards", h("span", { class: "n" }, `${num(flat)} of ${num(byTask.length)}`)) : null));
}

function tokenCard() {
  const { ledger } = INDEX;
  if (!ledger) return card("Sampled tokens", h("strong", {}, "–"), h("p", { class: "dim" }, "not yet"));
  const { excluded, off } = balance(ledger);
  const differ = INDEX.has_traces && INDEX.run.finished_at && INDEX.trained_in_traces !== ledger.trained;
  return card("Sampled tokens", h("strong", {}, num(ledger.captured), h("small", {}, " captured")), ledgerBar(ledger),
    h("ul", { class: "keys" }, h("li", {}, h("i", { class: "sw trained" }), "trained", h("span", { class: "n" }, num(ledger.trained))),
      h("li", {}, h("i", { class: "sw x0" }), "excluded, with a reason", h("span", { class: "n" }, num(excluded))),
      h("li", { class: off ? "bad" : "ok" }, off ? "⚠ not balanced" : "✓ balanced", h("span", { class: "n" }, off ? num(off) : "")),
      differ ? h("li", { class: "bad" }, "⚠ the traces hold another number", h("span", { class: "n" }, num(INDEX.trained_in_traces))) : null));
}

function notes() {
  const list = INDEX.gaps.map((g) => h("p", { class: "note" }, h("b", {}, `${g.state}: `), g.name, h("span", { class: "dim" }, ` · ${g.why}`)));
  if (!INDEX.run.finished_at) list.unshift(h("p", { class: "note" }, h("b", {}, "still running "),
    `when this page was written (${when(INDEX.written_at)}): numbers are those so far. Render again for newer ones.`));
  if (INDEX.bad_line_count) list.push(h("div", { class: "note bad" }, h("b", {}, `${plural(INDEX.bad_line_count, "line")} of sessions.jsonl could not be read`),
    fold("which", false, h("pre", {}, INDEX.bad_lines.join("\n")))));
  if (INDEX.left_out.length) list.push(h("div", { class: "note" },
    h("b", {}, `details of ${num(INDEX.left_out.length)} of ${num(INDEX.sessions.length)} sessions are not in this file: `),
    `${bytes(INDEX.cap)} are embedded, sessions with errors first, then in order. Their rows, rewards and ledgers are complete.`,
    fold("which", false, h("p", { class: "ids" }, INDEX.left_out.join("  ")))));
  return list;
}

// --- sessions ------------------------------------------------------------------------------------------------------

function sessionRow(session) {
  const td = (cls, ...kids) => h("td", { class: cls }, kids);
  return h("tr", { class: "open" + (view.selected === session.id ? " selected" : ""), data: { session: session.id },
    onclick: (e) => { if (!e.target.closest("a")) location.hash = hashOf({ session: session.id }); } },
  td("id", sessionLink(session), session.left_out ? h("span", { class: "dim", title: "details not in this file" }, " ∘") : null),
  td(null, badge(session.status)), td("n " + (session.reward === null ? "soft" : "strong"), reward(session.reward)),
  td("n", num(session.calls)), td("n", num(session.traces)), td("n", num(session.sampled)),
  td("n dim", session.ledger && balance(session.ledger).off ? h("b", { class: "no", title: "the ledger is not balanced" }, "⚠ ") : null,
    session.ledger ? num(session.ledger.trained) : "–"), td(null, stageBar(session.timings, LONGEST)),
  td("err", session.error ? h("span", { title: session.error.message }, h("b", {}, session.error.kind), " ", session.error.message) : ""));
}

function groupBody(task, members, openByDefault) {
  const open = view.open.get(task) ?? openByDefault;
  const g = spread(members);
  const asked = (INDEX.tasks[task] || {}).num_samples;
  const toggle = () => { view.open.set(task, !open); drawTable(); };
  const head = h("tr", { class: "group" }, h("td", { colspan: String(COLUMNS.length) }, h("div", { class: "grouprow" },
    h("button", { type: "button", class: "twist", "aria-expanded": String(open), "aria-label": `sessions of ${task}`, onclick: toggle }, open ? "▾" : "▸"),
    h("b", { class: "taskname", title: task }, task), h("span", { class: "chips" }, members.map((s) => rewardChip(s, RANGE))),
    g.flat ? h("span", { class: "flag", title: "all scored samples have the same reward: no advantage, nothing to learn" }, "zero variance") : null,
    h("span", { class: "dim n grow" }, g.n ? `mean ${fixed(g.mean, 3)}${g.n > 1 ? ` ± ${fixed(g.sd, 3)}` : ""}` : "no reward",
      g.unscored ? ` · ${g.unscored} not scored` : "", Number.isInteger(asked) && asked > members.length ? ` · ${members.length} of ${asked} shown` : ""))));
  return h("tbody", {}, head, open ? members.map(sessionRow) : null);
}

let tableHolder = null;
let countHolder = null;

function drawTable() {
  const list = filtered();
  const header = COLUMNS.map(([name, , numeric], i) => h("th", { class: numeric ? "n" : null, scope: "col",
    "aria-sort": view.sort === i ? (view.down ? "descending" : "ascending") : null },
  h("button", { type: "button", onclick: () => sortBy(i) }, name, h("span", {}, view.sort === i ? (view.down ? " ↓" : " ↑") : ""))));
  const all = groups(list);
  const bodies = view.grouped ? all.map(([task, members]) => groupBody(task, members, list.length <= 48 || all.length === 1))
    : [h("tbody", {}, list.map(sessionRow))];
  tableHolder.replaceChildren(list.length ? h("div", { class: "scroll" }, h("table", { class: "grid sessions" },
    h("colgroup", {}, WIDTHS.map((w) => h("col", { css: { width: w } }))),
    h("thead", {}, h("tr", {}, header)), bodies))
    : h("p", { class: "dim empty" }, INDEX.sessions.length ? "no session matches" : "not yet: no session has ended"));
  countHolder.textContent = list.length === INDEX.sessions.length ? plural(list.length, "session") : `${num(list.length)} of ${plural(INDEX.sessions.length, "session")}`;
}

function sortBy(i) {
  if (view.sort !== i) Object.assign(view, { sort: i, down: COLUMNS[i][2] });
  else if (view.down === COLUMNS[i][2]) view.down = !view.down;
  else view.sort = null;
  drawTable();
}

function runPage() {
  tableHolder = h("div", {});
  countHolder = h("span", { "aria-live": "polite" });
  const filter = h("input", { type: "search", id: "filter", placeholder: "filter by task, status, error …", "aria-label": "filter sessions", value: view.filter,
    oninput: (e) => { view.filter = e.target.value; drawTable(); } });
  const grouped = h("button", { type: "button", class: "quiet", "aria-pressed": String(view.grouped),
    onclick: (e) => { view.grouped = !view.grouped; e.currentTarget.setAttribute("aria-pressed", String(view.grouped)); drawTable(); } }, "by task");
  const fold = (open) => h("button", { type: "button", class: "quiet", onclick: () => { for (const s of INDEX.sessions) view.open.set(s.task, open); drawTable(); } }, open ? "open all" : "close all");
  const page = h("div", { class: "page" },
    h("header", { class: "head" }, h("h1", {}, runName()), runFacts()), notes(),
    h("div", { class: "cards" }, statusCard(), rewardCard(), tokenCard()),
    section("Sessions", countHolder, h("div", { class: "toolbar" }, filter, grouped, fold(true), fold(false),
      h("span", { class: "grow" }), stageLegend(), h("span", { class: "dim keyshint" }, h("kbd", {}, "j"), h("kbd", {}, "k"), " move ", h("kbd", {}, "enter"), " open ", h("kbd", {}, "/"), " filter")), tableHolder),
    section("Ledger", `every sampled token, from ${INDEX.ledger_from}`, ledgerPanel(INDEX.ledger, INDEX.has_traces ? INDEX.trained_in_traces : null)));
  drawTable();
  return page;
}

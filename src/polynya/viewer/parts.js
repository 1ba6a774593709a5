// parts.js: the pieces that the run page and the session page share: badges, bars, the ledger.

const STAGES = ["queued", "init", "ready", "running", "postrun"];
const STATUS_MARK = table({
  completed: "✓", failed: "✕", timeout: "◷", budget_exhausted: "◔", infra_error: "!", cancelled: "–", open: "…",
});
const STATUSES = Object.keys(STATUS_MARK);
const EXCLUSION_WORDS = table({
  text_only: "the engine gave no token ids",
  incomplete_ids: "sampled ids without prompt ids, or the other way round",
  length_mismatch: "not as many logprobs as sampled ids",
  nonfinite_logprob: "a logprob is NaN, infinite, null or above zero",
  id_out_of_range: "an id lies outside the vocabulary",
  grammar_masked: "guided decoding: logprobs of a masked distribution",
  not_delivered: "the client was gone before the reply",
  cancelled: "the call was cancelled in the engine; tokens unknown",
  superseded_retry: "a retry took this reply's place",
  auxiliary_lane: "a side call of the harness (titles, probes)",
  compaction_lane: "a compaction call of the harness",
  attempt_lost: "the attempt died with its node and ran again",
  late_write: "finished after the session was sealed",
});

function badge(status) {
  return h("span", { class: "badge s-" + (STATUSES.includes(status) ? status : "open") },
    h("b", {}, STATUS_MARK[status] || "?"), words(status));
}

const sessionLink = (session, label) => h("a", { href: hashOf({ session: session.id }) }, label ?? session.id);

function stageBar(timings, longest) {
  const total = STAGES.reduce((sum, stage) => sum + (timings[stage] || 0), 0);
  const title = STAGES.filter((s) => timings[s] !== undefined).map((s) => `${s} ${duration(timings[s])}`).join(" · ");
  const bar = h("span", { class: "stages", title: title || "no timings" });
  for (const stage of STAGES) {
    const width = longest ? (100 * (timings[stage] || 0)) / longest : 0;
    if (width > 0) bar.append(h("i", { class: "st-" + stage, css: { width: width.toFixed(3) + "%" } }));
  }
  return h("span", { class: "stagecell" }, bar, h("span", { class: "n dim" }, total ? duration(total) : "–"));
}

function stageLegend() {
  return h("span", { class: "legend" }, STAGES.map((s) => h("span", {}, h("i", { class: "sw st-" + s }), s)));
}

function card(title, ...kids) {
  return h("section", { class: "card" }, h("h3", {}, title), kids);
}

function section(title, note, ...kids) {
  return h("section", { class: "block", data: { title } }, h("h2", {}, title, note ? h("small", {}, note) : null), kids);
}

function facts(pairs) {
  const list = h("dl", { class: "facts" });
  for (const [name, value] of pairs) {
    if (value === null || value === undefined || value === "" || value === "–") continue;
    list.append(h("div", {}, h("dt", {}, name), h("dd", {}, value)));
  }
  return list;
}

function fold(summary, open, ...kids) {
  return h("details", { open }, h("summary", {}, summary), kids);
}

// A copyable text with the JSON indented where it is JSON.
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

// --- rewards -------------------------------------------------------------------------------------------------------

function spread(sessions) {
  const scored = sessions.filter((s) => s.reward !== null && s.reward !== undefined);
  const n = scored.length;
  const mean = n ? scored.reduce((a, s) => a + s.reward, 0) / n : null;
  const variance = n ? scored.reduce((a, s) => a + (s.reward - mean) ** 2, 0) / n : null;
  const flat = n >= 2 && scored.every((s) => s.reward === scored[0].reward);
  return { n, mean, sd: n ? Math.sqrt(variance) : null, flat, unscored: sessions.length - n };
}

function rewardChip(session, range) {
  const known = session.reward !== null && session.reward !== undefined;
  const [low, high] = range;
  const level = known ? (high > low ? (session.reward - low) / (high - low) : session.reward > 0 ? 1 : 0) : 0;
  return h("a", {
    class: "chip" + (known ? "" : " none") + (level > 0.62 ? " deep" : ""),
    href: hashOf({ session: session.id }),
    css: known ? { "--level": level.toFixed(3) } : {},
    title: `${session.id}: ${words(session.status)}, reward ${reward(session.reward)}`,
  }, known ? reward(session.reward) : STATUS_MARK[session.status] || "?");
}

// --- the ledger ----------------------------------------------------------------------------------------------------

function balance(ledger) {
  const excluded = sumOf(ledger.excluded);
  return { excluded, off: ledger.captured - ledger.trained - excluded };
}

function verdict(ledger, trainedInTraces) {
  const { excluded, off } = balance(ledger);
  const lines = [];
  if (off === 0) {
    lines.push(h("p", { class: "check ok" }, h("b", {}, "✓"),
      `balanced: ${num(ledger.captured)} captured = ${num(ledger.trained)} trained + ${num(excluded)} excluded`));
  } else {
    lines.push(h("p", { class: "check bad", role: "alert" }, h("b", {}, "⚠"),
      `not balanced: ${num(ledger.captured)} captured, but ${num(ledger.trained)} trained + ${num(excluded)} excluded ` +
      `= ${num(ledger.trained + excluded)} (${num(Math.abs(off))} ${off > 0 ? "unaccounted for" : "too many"})`));
  }
  if (trainedInTraces !== null) {
    const same = trainedInTraces === ledger.trained;
    const lags = !same && !INDEX.run.finished_at;
    if (lags) lines.push(h("p", { class: "check dim" }, h("b", {}, "…"),
      `not yet: the traces hold ${num(trainedInTraces)} of ${num(ledger.trained)} trained tokens while the run goes on`));
    else lines.push(h("p", { class: "check " + (same ? "ok" : "bad"), role: same ? null : "alert" },
      h("b", {}, same ? "✓" : "⚠"),
      same ? "the traces hold exactly as many trained tokens"
        : `the traces hold ${num(trainedInTraces)} trained tokens, the ledger says ${num(ledger.trained)}`));
  }
  return lines;
}

function ledgerBar(ledger) {
  const { excluded } = balance(ledger);
  const whole = Math.max(ledger.captured, ledger.trained + excluded) || 1;
  const bar = h("div", { class: "ledgerbar" });
  const part = (name, count, title) => count > 0 && bar.append(
    h("i", { class: name, title, css: { width: ((100 * count) / whole).toFixed(4) + "%" } }));
  part("trained", ledger.trained, `trained: ${num(ledger.trained)}`);
  Object.entries(ledger.excluded || {}).sort((a, b) => b[1] - a[1]).forEach(([reason, count], i) =>
    part("x" + (i % 6), count, `${words(reason)}: ${num(count)}`));
  part("missing", whole - ledger.trained - excluded, "unaccounted for");
  return bar;
}

function ledgerTable(ledger) {
  const rows = Object.entries(ledger.excluded || {}).sort((a, b) => b[1] - a[1]);
  const row = (swatch, name, why, count) => h("tr", {},
    h("td", {}, h("i", { class: "sw " + swatch }), name, why ? h("span", { class: "dim" }, " " + why) : null),
    h("td", { class: "n" }, num(count)), h("td", { class: "n dim" }, percent(count, ledger.captured)));
  return h("table", { class: "plain" }, h("tbody", {},
    row("trained", "trained", "", ledger.trained),
    rows.map(([reason, count], i) => row("x" + (i % 6), words(reason), EXCLUSION_WORDS[reason] || "", count)),
    h("tr", { class: "sum" }, h("td", {}, "captured"), h("td", { class: "n" }, num(ledger.captured)), h("td", {}))));
}

function counts(title, object, none) {
  const rows = Object.entries(object || {}).sort((a, b) => b[1] - a[1]);
  return h("div", {}, h("h4", {}, title), rows.length
    ? h("table", { class: "plain" }, h("tbody", {}, rows.map(([name, n]) =>
      h("tr", {}, h("td", {}, words(name)), h("td", { class: "n" }, num(n))))))
    : h("p", { class: "dim" }, none));
}

function ledgerPanel(ledger, trainedInTraces, small) {
  if (!ledger) return h("p", { class: "dim" }, "not yet: no ledger has been written");
  return h("div", { class: "ledger" }, verdict(ledger, trainedInTraces), ledgerBar(ledger),
    h("div", { class: "ledgercols" }, ledgerTable(ledger),
      h("div", { class: "side" }, counts("Calls by outcome", ledger.calls_by_outcome, small ? "none" : "no calls"),
        counts("Chain breaks by cause", ledger.chain_breaks, "none: every prompt extended an earlier call"))));
}

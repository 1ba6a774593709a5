// page.js: which page stands at this address, and the keys.

const APP = document.getElementById("app");
let drawing = 0;
let lastSession = null;

function drawRun() {
  APP.replaceChildren(runPage());
}

async function draw() {
  const mine = ++drawing;
  const want = address();
  const root = document.documentElement;
  delete root.dataset.ready;
  const started = performance.now();
  const session = want.session ? INDEX.sessions.find((s) => s.id === want.session) : null;
  let page;
  try {
    if (session) page = await sessionPage(session, want);
    else if (want.session) page = h("div", { class: "page" }, h("p", { class: "note" }, `no session ${want.session} in this run. `, h("a", { href: "#" }, "All sessions")));
    else page = runPage();
  } catch (error) {
    page = h("div", { class: "page" }, h("p", { class: "note bad", role: "alert" }, `this page could not be drawn: ${error && error.message}`), h("a", { href: "#" }, "All sessions"));
    console.error(error);
  }
  if (mine !== drawing) return; // a newer address is being drawn
  const stay = session && session.id === lastSession ? scrollY : 0;
  if (!session) activeStrip = null;
  APP.replaceChildren(page);
  scrollTo(0, stay);
  if (session && session.id !== lastSession && want.trace !== undefined) jumpTo("Traces");
  lastSession = session ? session.id : null;
  if (session) view.selected = session.id;
  else if (view.selected) showSelected();
  if (activeStrip) {
    activeStrip.drawMap();
    if (want.token !== undefined) activeStrip.goto(Number.parseInt(want.token, 10));
  }
  root.dataset.drawMs = (performance.now() - started).toFixed(1);
  root.dataset.ready = "1";
  document.title = (session ? session.id + " · " : "") + "polynya · " + runName();
}

function showSelected() {
  const row = [...APP.querySelectorAll("tr[data-session]")].find((r) => r.dataset.session === view.selected);
  for (const other of APP.querySelectorAll("tr.selected")) other.classList.remove("selected");
  if (!row) return;
  row.classList.add("selected");
  row.scrollIntoView({ block: "nearest" });
}

function step(by) {
  const list = visibleSessions();
  if (!list.length) return;
  const at = list.findIndex((s) => s.id === view.selected);
  const next = list[Math.min(list.length - 1, Math.max(0, at < 0 ? (by > 0 ? 0 : list.length - 1) : at + by))];
  view.selected = next.id;
  if (address().session) location.hash = hashOf({ session: next.id });
  else {
    if (![...APP.querySelectorAll("tr[data-session]")].some((r) => r.dataset.session === next.id)) {
      view.open.set(next.task, true);
      drawTable();
    }
    showSelected();
  }
}

const KEYS = {
  j: () => step(1),
  k: () => step(-1),
  t: () => activeStrip && activeStrip.nextTrained(),
  l: () => activeStrip && activeStrip.nextLow(),
  Enter: () => { if (!address().session && view.selected) location.hash = hashOf({ session: view.selected }); },
  Escape: () => {
    if (activeStrip && activeStrip.pinned) { activeStrip.pinned = false; remember({ token: null }); }
    else if (address().session) location.hash = "";
  },
  "/": () => document.getElementById("filter")?.focus(),
};

addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.target.closest("input, textarea, select")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "Enter" && event.target.closest("a, button, summary, tr")) return;
  const act = KEYS[event.key];
  if (!act) return;
  if (event.key === "/") event.preventDefault();
  act();
});
addEventListener("hashchange", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => activeStrip && activeStrip.drawMap());
draw();

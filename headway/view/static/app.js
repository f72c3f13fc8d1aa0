// The page: what it knows of the run, where in it one is, and the theme.

import { Problem, follow, get } from "./api.js";
import { Dashboard } from "./dashboard.js";
import { h } from "./dom.js";
import { GroupView } from "./group.js";
import { GroupList } from "./groups.js";
import { History, NAMES } from "./series.js";

const REFRESH_MS = 1000;
const THEMES = ["system", "light", "dark"];
const THEME = "headway-theme";
const main = document.getElementById("main");

/** What is known of the run. */
class Run {
  constructor() {
    /** `window`: seconds of the timeline that are asked for. */
    Object.assign(this, { status: null, timeline: null, history: new History(), evaluations: [], versions: [], trainerSeconds: [], window: 60 });
  }

  /** Ask for everything anew; for the status only where it did not come by itself. */
  async refresh(known) {
    const since = Math.max(0, (this.timeline?.now ?? Date.now() / 1000) - this.window);
    const [status, timeline, evaluations, versions] = await Promise.all([
      known ?? get("/v1/status"), get(`/v1/timeline?since=${since}`), get("/v1/evaluations"), get("/v1/versions?limit=5"), this.history.refresh()]);
    Object.assign(this, { status, timeline, evaluations: evaluations.ended, versions: versions.versions });
    const last = status.last_step?.stats ?? {};
    this.trainerSeconds = Object.entries(last).filter(([name]) => name.startsWith("timing/") && name !== NAMES.stepS)
      .map(([name, value]) => [name.slice("timing/".length), value]).sort((a, b) => b[1] - a[1]);
  }

  /** Held-out reward by step, from the trainer's numbers and from evaluations that were asked for. */
  get heldOut() {
    const found = new Map(this.history.of(NAMES.heldOut));
    for (const one of this.evaluations) if (one.reward !== null) found.set(one.step, one.reward);
    return [...found].sort((a, b) => a[0] - b[0]);
  }
}

const run = new Run();
let view = null;
let connection = "";

function state() {
  const element = document.getElementById("state");
  const words = { live: "live", lost: "connection lost, trying again", over: "finished run" };
  const status = run.status ? `step ${run.status.num_steps}${run.status.total_steps ? ` of ${run.status.total_steps}` : ""}` : "";
  const text = [words[connection], status].filter(Boolean).join(" · ");
  element.className = `state ${connection}`;
  if (element.textContent !== text) element.textContent = text;
}

function complain(error) {
  console.assert(error instanceof Problem, error);
  main.replaceChildren(h("p", { class: "notice", role: "alert" }, error.message));
}

/** Refresh at most every REFRESH_MS, however many events come. */
let due = null;
let isRefreshing = false;

async function refresh(known) {
  if (isRefreshing) {
    due = known;
    return;
  }
  isRefreshing = true;
  try {
    await run.refresh(known);
    document.getElementById("run").textContent = run.status.run;
    document.title = `${run.status.run} · Headway`;
    state();
    if (view instanceof Dashboard) view.show();
  } catch (error) {
    if (!(error instanceof Problem || error instanceof TypeError)) throw error;
  }
  setTimeout(() => {
    isRefreshing = false;
    if (due) {
      const newest = due;
      due = null;
      refresh(newest);
    }
  }, REFRESH_MS);
}

function route() {
  const [path, query = ""] = location.hash.slice(1).split("?");
  const parameters = new URLSearchParams(query);
  view?.close();
  const isGroups = path.startsWith("/group");
  mark("to-dashboard", !isGroups);
  mark("to-groups", isGroups);
  if (path.startsWith("/group/")) view = new GroupView(main, decodeURIComponent(path.slice("/group/".length)), parameters);
  else if (path === "/groups") view = new GroupList(main, parameters);
  else view = new Dashboard(main, run);
}

function mark(id, isHere) {
  if (isHere) document.getElementById(id).setAttribute("aria-current", "page");
  else document.getElementById(id).removeAttribute("aria-current");
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = `Theme: ${name}`;
  localStorage.setItem(THEME, name);
}

function nextTheme() {
  theme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
}

theme(localStorage.getItem(THEME) ?? "system");
document.getElementById("theme").addEventListener("click", nextTheme);
window.addEventListener("unhandledrejection", (event) => {
  if (event.reason instanceof Problem) {
    event.preventDefault();
    complain(event.reason);
  }
});
window.addEventListener("hashchange", () => { route(); main.focus({ preventScroll: true }); window.scrollTo(0, 0); });
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
route();
await refresh();
follow("/v1/events", (name, data) => { if (name === "status") refresh(data); }, (how) => { connection = how; state(); });

// The dashboard: one panel a question. `show` draws everything that is known; the app calls it whenever something came.

import { StalenessChart, bars } from "./bars.js";
import { LineChart, smoothed } from "./charts.js";
import { h } from "./dom.js";
import { clock, count, fixed, percent, seconds } from "./format.js";
import { Lanes } from "./lanes.js";
import { NAMES, joined } from "./series.js";

const WIDTH_OF_MEAN = 40;
const LONG_S = 30, VERSIONS = 5;
const PHASES = { pending_s: "waiting to start", generate_s: "generation", reward_s: "reward", other_s: "rest of the episode", journal_s: "to disk" };
const CHOICE = "headway-metric";

export class Dashboard {
  constructor(main, run) {
    this.run = run;
    this.figures = h("dl", { class: "figures" });
    this.now = h("p", { class: "now", hidden: true });
    this.reward = new LineChart({ label: "Reward by step", format: (y) => fixed(y) });
    this.staleness = new StalenessChart();
    this.lanes = new Lanes((seconds) => { run.window = seconds; });
    this.throughput = new LineChart({ label: "Samples a second by step", format: (y) => count(y), low: 0 });
    this.limits = h("div");
    this.discards = h("div");
    this.latency = h("div");
    this.trainer = h("div");
    this.fleet = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Engines" });
    this.any = new LineChart({ label: "A metric of choice by step" });
    this.choice = h("select", { "aria-label": "Metric", onchange: () => this.#choose(this.choice.value) });
    this.choices = "";
    this.panels = h("div", { class: "panels" },
      panel("wide", "Reward", this.reward.element),
      panel("", "Staleness of tokens", this.staleness.element),
      panel("full", ["Timeline", this.lanes.window], this.lanes.element),
      panel("half", "Throughput against the limit", this.throughput.element),
      panel("half", "Room to run ahead", this.limits),
      panel("", "Discards by reason", this.discards),
      panel("", "Where a rollout's time goes", this.latency),
      panel("", "Where the trainer's time goes", this.trainer),
      panel("half", "Versions across the fleet", this.fleet),
      panel("half", ["Any metric", this.choice], this.any.element));
    main.replaceChildren(h("h2", { class: "hidden" }, "Dashboard"), this.figures, this.now, this.panels);
    this.show();
  }

  close() {}

  show() {
    const { status, timeline } = this.run;
    if (!status) return;
    this.#figures(status);
    this.#now(status);
    this.#curves();
    this.staleness.set(status.tokens.gradient, status.tokens.masked, status.staleness.eta);
    if (timeline) this.lanes.set(timeline, status.has_ended);
    this.#hide(this.lanes.element, !timeline?.lanes.length);
    this.#hide(this.limits, status.has_ended);
    this.#hide(this.fleet, status.has_ended && !status.servers.length);
    this.#hide(this.latency, status.has_ended && !status.timing.num_groups);
    this.#limits(status);
    this.#discards(status);
    this.#latency(status.timing);
    this.#trainer();
    this.#fleet(status);
    this.#any();
  }

  #last(name) {
    return this.run.history.of(NAMES[name]).at(-1)?.[1];
  }

  /** A panel that can have nothing to say is not there. */
  #hide(content, isHidden) {
    content.closest(".panel").hidden = isHidden;
  }

  #figures(status) {
    const held = this.run.heldOut, lost = Object.values(status.discards).reduce((sum, one) => sum + one.count, 0);
    const total = status.total_steps ? `of ${status.total_steps}` : "", stalest = this.#last("stalest");
    const ended = Object.values(status.num_rollouts).reduce((sum, one) => sum + one, 0);
    this.figures.replaceChildren(
      figure("Step", status.num_steps, total),
      figure("Reward", fixed(this.#last("reward")), "last step's mean"),
      figure("Held-out reward", fixed(held.at(-1)?.[1]), held.length > 1 ? `from ${fixed(held[0][1])}` : ""),
      figure("Staleness", fixed(this.#last("staleness"), 2), `at most ${stalest ?? "–"}, bound ${status.staleness.eta}`),
      figure("Samples a second", count(this.#last("samplesPerS")), `${count(this.#last("tokensPerS"))} tokens a second`),
      figure("Discards", count(lost), ended ? `${percent(lost / Math.max(1, ended))} of ${count(ended)} rollouts` : ""),
      figure("Version", status.published_version ?? "–", "published"),
      figure("Tasks", status.tasks.is_conserved ? "conserved" : "NOT conserved", `${count(status.tasks.consumed)} of ${count(status.tasks.submitted)} trained on`,
        status.tasks.is_conserved ? "" : "bad"));
  }

  /** What holds the run back now: said quietly, as long as nothing is waited for long. */
  #now(status) {
    const { waits, staleness: { holds_back: why } } = status;
    const parts = [why ? `No new rollouts: ${why}.` : "Nothing holds new rollouts back.",
      ...waits.slice(0, 3).map((wait) => `Waiting for ${wait.what}, since ${seconds(wait.since_s)}.`)];
    const isLong = waits.some((wait) => wait.since_s >= LONG_S);
    this.now.hidden = status.has_ended;
    this.now.className = `now notice ${isLong ? "long" : ""}`;
    const text = parts.join(" ");
    if (this.now.textContent !== text) this.now.textContent = text;
  }

  #curves() {
    const { history, heldOut } = this.run;
    const reward = history.of(NAMES.reward), width = Math.floor(reward.length / WIDTH_OF_MEAN);
    const curves = width > 1
      ? [{ name: "training", colour: "c1", kind: "faint", points: reward }, { name: `mean of ${width} steps`, colour: "c1", points: smoothed(reward, width) }]
      : [{ name: "training", colour: "c1", points: reward }];
    this.reward.set([...curves, { name: "held-out", colour: "c2", kind: "dots", points: heldOut }]);
    const work = joined(history.of(NAMES.stepS), history.of(NAMES.waitS), (all, waited) => Math.max(1e-9, all - waited));
    const limit = joined(history.of(NAMES.samples), work, (samples, busy) => samples / busy);
    this.throughput.set([
      { name: "trained on", colour: "c1", points: history.of(NAMES.samplesPerS) },
      { name: "if the trainer never waited", colour: "c4", kind: "dashed", points: limit }]);
  }

  #limits(status) {
    const { staleness: bound, tasks } = status;
    const row = (name, value, of, why) => ({ name, value: of ? value / of : 0, text: `${count(value)} of ${count(of)}`, why });
    this.limits.replaceChildren(bars([
      row("groups outstanding", bound.outstanding, bound.limit, `(bound ${bound.eta} + 1) × ${bound.batch_size} groups of a step; policy ${bound.policy}`),
      row("rollouts running", tasks.running, bound.max_concurrent, "rollout.max_concurrent_rollouts"),
      row("groups ready for the next step", tasks.ready, bound.batch_size, `${count(tasks.pending)} tasks wait to start, ${count(tasks.leased)} are being trained on`),
    ], { of: 1, label: "Room to run ahead" }));
  }

  #discards(status) {
    const rows = Object.entries(status.discards).filter(([, one]) => one.count).sort((a, b) => b[1].count - a[1].count);
    if (!rows.length) return this.discards.replaceChildren(h("p", { class: "muted" }, "None: every rollout was used, or still is to be."));
    this.discards.replaceChildren(bars(rows.map(([reason, one]) => ({
      name: reason.replaceAll("_", " "), value: one.count, text: count(one.count), colour: "c2",
      why: one.examples.length ? `${one.examples.at(-1).task_id}: ${one.examples.at(-1).message}` : "",
    })), { label: "Discards by reason" }));
  }

  #latency(timing) {
    if (!timing.num_groups) return this.latency.replaceChildren(h("p", { class: "muted" }, "No group is finished yet."));
    const rows = Object.entries(PHASES).map(([key, name]) => ({ name, value: timing[key], text: seconds(timing[key]), colour: key === "reward_s" ? "c2" : "c1" }));
    this.latency.replaceChildren(bars(rows, { label: "Mean seconds of a rollout by phase" }),
      h("p", { class: "readout" }, `means over ${count(timing.num_groups)} groups; the reward takes ${seconds(timing.reward_s)}`));
  }

  #trainer() {
    const phases = this.run.trainerSeconds;
    if (!phases.length) return this.trainer.replaceChildren(h("p", { class: "muted" }, "No step is finished yet."));
    const rows = phases.map(([name, value]) => ({ name: name.replaceAll("_", " "), value, text: seconds(value), colour: name === "wait_for_batch" ? "c4" : "c1" }));
    this.trainer.replaceChildren(bars(rows, { label: "Seconds of the last step by phase" }), h("p", { class: "readout" }, "seconds of the last step"));
  }

  #fleet(status) {
    if (!status.servers.length) return this.fleet.replaceChildren(h("p", { class: "muted" }, "No engine is registered."));
    const published = stepOf(status.published_version);
    const servers = [...status.servers].sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
    const rows = servers.map((server) => {
      const behind = server.served_version === null ? null : published - stepOf(server.served_version);
      return h("tr", {}, h("td", {}, server.name),
        h("td", {}, h("span", { class: `chip ${server.state === "serving" ? "ok" : "warn"}` }, server.state)),
        h("td", {}, server.served_version ?? "–"), h("td", { class: "number" }, behind ?? "–"),
        h("td", { class: "number" }, server.num_requests), h("td", { class: "muted" }, server.detail));
    });
    const heads = [["engine"], ["state"], ["serves"], ["behind", "number"], ["requests", "number"], ["detail"]];
    this.fleet.replaceChildren(plainTable("Engines and the version that each serves", heads, rows), this.#versions());
  }

  #versions() {
    const { versions } = this.run;
    if (!versions.length) return "";
    const rows = versions.slice(0, VERSIONS).map((one) => h("tr", {}, h("td", {}, one.version), h("td", {}, clock(one.published_at)),
      h("td", { class: "number" }, one.served_by.length), h("td", { class: "number" }, seconds(one.fleet_update?.total_s)),
      h("td", { class: "number" }, seconds(one.fleet_update?.pause_s))));
    const heads = [["version"], ["published"], ["engines", "number"], ["moved in", "number"], ["longest pause", "number"]];
    return plainTable("The newest versions, and how the fleet was moved to them", heads, rows);
  }

  #any() {
    const { names } = this.run.history, listed = names.join("\n");
    if (listed !== this.choices) {
      const chosen = localStorage.getItem(CHOICE), likely = "ppo_actor/update/entropy/avg";
      const first = names.includes(chosen) ? chosen : names.includes(likely) ? likely : names[0];
      this.choices = listed;
      this.choice.replaceChildren(...names.map((name) => h("option", { value: name, selected: name === first }, name)));
      if (first) this.#choose(first);
    }
    const name = this.choice.value;
    this.any.set([{ name, colour: "c3", points: this.run.history.of(name) }]);
  }

  async #choose(name) {
    if (this.choice.value === name) localStorage.setItem(CHOICE, name);
    this.run.history.add(name);
    await this.run.history.refresh();
    this.any.set([{ name, colour: "c3", points: this.run.history.of(name) }]);
  }
}

function panel(size, title, ...content) {
  const [name, ...beside] = [title].flat();
  return h("section", { class: `panel ${size}`, "aria-label": name }, h("h2", {}, h("span", {}, name), ...beside), content);
}

function plainTable(caption, heads, rows) {
  return h("table", {}, h("caption", { class: "hidden" }, caption),
    h("thead", {}, h("tr", {}, heads.map(([head, kind]) => h("th", { scope: "col", class: kind }, head)))), h("tbody", {}, rows));
}

function figure(name, value, more, kind = "") {
  return h("div", {}, h("dt", {}, name), h("dd", { class: kind }, String(value), h("small", {}, more ?? "")));
}

function stepOf(version) {
  return version === null ? null : Number(version.split(".")[1]);
}

// The samples of one group, side by side.

import { get } from "./api.js";
import { h } from "./dom.js";
import { fixed, plural } from "./format.js";
import { groupAddress } from "./groups.js";
import { COLOURS, Tokens, facts, legendOf, scaleOf } from "./tokens.js";

const ORDERS = { sample: "number", reward: "reward", length: "length" };
const AT_ONCE = 6;

export class GroupView {
  constructor(main, taskId, parameters) {
    Object.assign(this, { main, taskId, parameters, mode: parameters.get("colour") ?? "version", order: "sample" });
    this.#open();
  }

  close() {
    this.isClosed = true;
  }

  async #open() {
    const task = await get(`/v1/groups/${encodeURIComponent(this.taskId).replaceAll("%2F", "/")}`);
    if (this.isClosed) return;
    const is = (name, value) => !this.parameters.has(name) || this.parameters.get(name) === String(value);
    const group = task.groups.find((one) => is("kind", one.kind) && is("step", one.step) && is("attempt", one.attempt)) ?? task.groups[0];
    this.about = h("div", { class: "about", role: "status" });
    this.#tell(null);
    this.grid = h("div", { class: "samples" });
    this.scale = h("div");
    this.prompt = h("div", { class: "prompt-text mono", tabindex: "0", role: "region", "aria-label": "Prompt" });
    this.main.replaceChildren(h("div", {},
      h("p", {}, h("a", { href: "#/groups?kind=train" }, "← all groups")),
      h("h2", { class: "title" }, `Task ${group.task_id}`), this.#facts(group), this.#others(task.groups, group), this.prompt,
      h("div", { class: "tools" }, this.#modes(), this.#orders(), this.scale), this.grid, this.about));
    await this.#load(group);
  }

  #facts(group) {
    const pairs = [["made for", group.kind === "train" ? "training" : "evaluation"], ["outcome", group.outcome], ["attempt", group.attempt],
      ["newest version", `v${group.step}`], ["trained at step", group.consumed_step ?? "–"], ["staleness", group.staleness ?? "–"],
      ["reward", `${fixed(group.reward)} (${fixed(group.reward_min, 2)} to ${fixed(group.reward_max, 2)})`],
      ["length", `${fixed(group.length, 1)} mean, ${group.length_max} longest`]];
    return h("dl", { class: "facts" }, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  }

  #others(groups, shown) {
    const others = groups.filter((one) => one !== shown);
    if (!others.length) return null;
    return h("p", { class: "muted" }, "Also made of this task: ", others.map((one, i) => [i ? ", " : "",
      h("a", { href: groupAddress(one) }, `${one.kind === "train" ? "training" : "evaluation"}, v${one.step}, attempt ${one.attempt}`)]));
  }

  #choices(name, label, options, chosen, choose) {
    return h("fieldset", { class: "segments" }, h("legend", {}, label), Object.entries(options).map(([value, text]) =>
      h("label", {}, h("input", { type: "radio", name, value, checked: value === chosen, onchange: () => choose(value) }), text)));
  }

  #modes() {
    const labels = Object.fromEntries(Object.entries(COLOURS).map(([mode, { label }]) => [mode, label]));
    this.modes = this.#choices("colour", "Colour by", labels, this.mode, (mode) => { this.mode = mode; this.#colour(); });
    return this.modes;
  }

  #orders() {
    return this.#choices("order", "Order by", ORDERS, this.order, (order) => { this.order = order; this.#arrange(); });
  }

  /** Get the samples, some at a time, in order. */
  async #load(group) {
    const place = new URLSearchParams({ kind: group.kind, step: group.step, attempt: group.attempt });
    const path = (sample) => `/v1/trajectories/${encodeURIComponent(group.task_id).replaceAll("%2F", "/")}/${sample}?${place}`;
    this.cards = [];
    for (let from = 0; from < group.samples.length; from += AT_ONCE) {
      const some = await Promise.all(group.samples.slice(from, from + AT_ONCE).map((one) => get(path(one.sample))));
      if (this.isClosed) return;
      if (from === 0) this.#showPrompt(some[0]);
      this.cards.push(...some.map((sample) => this.#card(sample)));
      this.#arrange();
      this.#colour();
    }
  }

  #showPrompt(sample) {
    const text = sample.pieces ? sample.pieces.slice(0, sample.prompt_len).join("") : sample.text;
    this.prompt.append(h("h3", { class: "muted" }, `Prompt, ${plural(sample.prompt_len, "token")}`), h("div", { class: "tokens" }, text));
  }

  #card(sample) {
    const tokens = new Tokens(sample, sample.prompt_len, (one, i) => this.#tell(one, i));
    const trained = sample.trained ? `normalised ${fixed(sample.trained.reward, 2)}` : null;
    const versions = sample.version_min === sample.version_max ? `v${sample.version_min}` : `v${sample.version_min} to v${sample.version_max}`;
    const told = [`reward ${fixed(sample.reward)}`, trained, plural(sample.length, "token"), versions, sample.stop_reason].filter(Boolean);
    const element = h("article", { class: "sample", "aria-label": `Sample ${sample.sample}` },
      h("header", {}, h("h3", {}, `#${sample.sample}`), told.map((text) => h("span", {}, text))), tokens.element);
    return { sample, tokens, element };
  }

  #arrange() {
    const { order } = this, sign = order === "sample" ? 1 : -1;
    const value = (card) => card.sample[order] ?? -Infinity;
    this.cards.sort((a, b) => sign * (value(a) - value(b)) || a.sample.sample - b.sample.sample);
    this.grid.replaceChildren(...this.cards.map((card) => card.element));
  }

  #colour() {
    const samples = this.cards.map((card) => card.sample);
    const isTrained = samples.some((sample) => sample.trained);
    for (const input of this.modes.querySelectorAll("input")) input.disabled = !isTrained && COLOURS[input.value].needsTrained === true;
    const mode = COLOURS[this.mode]?.needsTrained && !isTrained ? "version" : this.mode;
    const scale = scaleOf(mode, samples);
    for (const card of this.cards) card.tokens.colour(mode, scale);
    this.scale.replaceChildren(legendOf(scale), isTrained ? "" : h("span", { class: "muted" }, " The trainer has written nothing of this group."));
  }

  #tell(sample, i) {
    this.about.replaceChildren(sample === null
      ? h("p", {}, "Point at a token, or go to a sample's tokens and use the arrow keys, to see its numbers here.")
      : h("dl", {}, facts(sample, i).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", { class: name === "token" ? "mono" : null }, String(value))))));
  }
}

// The tokens of one sample, coloured by one of their numbers.

import { h } from "./dom.js";
import { fixed, percent } from "./format.js";

/** Colours that are laid over the ground, thinly, so that the text can be read in both themes. */
const RAMP = ["46 160 67", "17 158 150", "31 119 214", "98 84 222", "154 70 201", "200 60 140", "214 69 61", "204 122 20"];
const FALLING = [0, 0.1, 0.2, 0.3, 0.4, 0.52, 0.65].map((part) => `rgb(224 108 32 / ${part})`);
const LOW = "222 60 48", HIGH = "28 118 214", MOST = 0.65;
const IN_ONE_GO = 2000;
const OUTLIERS = 0.02;

/** How tokens can be coloured. Each: name, whether a sample has it, the number of a token, and its colour. */
export const COLOURS = {
  version: { label: "Version", of: (sample, i) => (sample.versions[i] < 0 ? null : sample.versions[i]), kind: "version" },
  logprob: { label: "Log-prob", of: (sample, i) => (sample.versions[i] < 0 ? null : sample.logprobs[i]), kind: "falling" },
  advantage: { label: "Advantage", of: (sample, i) => trained(sample, "advantages", i), kind: "signed", needsTrained: true },
  divergence: { label: "Divergence", of: (sample, i) => trained(sample, "divergence", i), kind: "signed", needsTrained: true },
};

function trained(sample, name, i) {
  return sample.trained && sample.trained.loss_mask[i] ? sample.trained[name][i] : null;
}

/** The scale of a way to colour over some samples: a colour for each number, and what the legend shows. */
export function scaleOf(mode, samples) {
  const { of, kind } = COLOURS[mode];
  const values = samples.flatMap((sample) => sample.token_ids.map((_, i) => of(sample, i))).filter((value) => value !== null);
  if (kind === "version") return versions([...new Set(values)].sort((a, b) => a - b));
  if (kind === "falling") return falling();
  const sizes = values.map(Math.abs).sort((a, b) => a - b);
  return signed(Math.max(sizes[Math.floor((sizes.length - 1) * (1 - OUTLIERS))] ?? 0, 1e-6));
}

function versions(steps) {
  const place = new Map(steps.map((step, i) => [step, `rgb(${RAMP[steps.length > RAMP.length ? Math.floor((i * RAMP.length) / steps.length) : i]} / 0.3)`]));
  return { colour: (step) => place.get(step), legend: steps.map((step) => [`v${step}`, place.get(step)]), isList: true };
}

function falling() {
  const colour = (logprob) => FALLING[Math.max(0, Math.min(FALLING.length - 1, Math.round(-logprob)))];
  return { colour, legend: FALLING.map((one) => ["", one]), from: "certain, 0", to: `unlikely, ${-(FALLING.length - 1)} and below` };
}

function signed(most) {
  const colour = (value) => `rgb(${value < 0 ? LOW : HIGH} / ${(MOST * Math.min(1, Math.abs(value) / most)).toFixed(3)})`;
  const steps = [-1, -0.66, -0.33, 0, 0.33, 0.66, 1];
  return { colour, legend: steps.map((part) => ["", colour(part * most)]), from: (-most).toPrecision(2), to: `+${most.toPrecision(2)}` };
}

/** The legend of a scale. */
export function legendOf(scale) {
  if (scale.isList) {
    return h("div", { class: "scale" }, scale.legend.map(([name, colour]) => h("span", { class: "scale" }, h("span", { class: "ramp" }, h("i", { style: { background: colour } })), name)));
  }
  return h("div", { class: "scale" }, scale.from, h("span", { class: "ramp", "aria-hidden": "true" }, scale.legend.map(([, colour]) => h("i", { style: { background: colour } }))), scale.to);
}

/** The tokens of a sample from `first` on. `tell(sample, index)` hears which one is looked at; null: none. */
export class Tokens {
  constructor(sample, first, tell) {
    Object.assign(this, { sample, first, tell, shown: first, at: null, mode: null });
    const id = `tokens-${sample.sample}`;
    this.element = h("div", {
      class: "tokens", id, tabindex: "0", role: "group",
      "aria-label": `Tokens of sample ${sample.sample}. The arrow keys go from token to token.`,
      onpointerover: (event) => this.#look(event.target.dataset?.i), onpointerleave: () => this.#look(undefined),
      onclick: (event) => this.#look(event.target.dataset?.i),
      onkeydown: (event) => this.#key(event), onfocus: () => this.#look(this.at ?? this.first), onblur: () => this.#look(undefined),
    });
    this.more = h("button", { type: "button", class: "quiet", onclick: () => this.#show() });
    this.#show();
  }

  colour(mode, scale) {
    Object.assign(this, { mode, scale });
    for (const span of this.element.children) if (span.dataset.i) this.#paint(span);
  }

  #show() {
    const { sample } = this, end = Math.min(sample.token_ids.length, this.shown + IN_ONE_GO);
    this.more.remove();
    for (let i = this.shown; i < end; i += 1) {
      const span = h("span", { "data-i": i, id: `t${sample.sample}-${i}` }, visible(textOf(sample, i)));
      if (textOf(sample, i) === "") span.classList.add("unseen");
      if (sample.versions[i] < 0) span.classList.add("given");
      this.element.append(span);
      if (this.scale) this.#paint(span);
    }
    this.shown = end;
    const left = sample.token_ids.length - end;
    if (left) {
      this.more.textContent = `Show ${Math.min(left, IN_ONE_GO)} more tokens`;
      this.element.append(this.more);
    }
  }

  #paint(span) {
    const value = COLOURS[this.mode].of(this.sample, Number(span.dataset.i));
    span.style.background = value === null || value === undefined ? "" : this.scale.colour(value);
  }

  #look(index) {
    const before = this.element.querySelector(".at");
    if (index === undefined) {
      if (document.activeElement === this.element && this.at !== null) return;
      before?.classList.remove("at");
      return this.tell(null);
    }
    before?.classList.remove("at");
    this.at = Number(index);
    const span = document.getElementById(`t${this.sample.sample}-${this.at}`);
    span?.classList.add("at");
    this.element.setAttribute("aria-activedescendant", span?.id ?? "");
    this.tell(this.sample, this.at);
  }

  #key(event) {
    const last = this.shown - 1, here = this.at ?? this.first;
    const next = { ArrowLeft: here - 1, ArrowRight: here + 1, ArrowUp: here - 10, ArrowDown: here + 10, Home: this.first, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    this.#look(Math.max(this.first, Math.min(last, next)));
    this.element.querySelector(".at")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}

export function textOf(sample, i) {
  return sample.pieces ? sample.pieces[i] : `${sample.token_ids[i]} `;
}

/** A text of which nothing is hidden: line ends and blanks alone, controls, half characters. */
function visible(text) {
  if (text === "") return "·";
  const shown = text.replace(/[\u0000-\u0008\u000b-\u001f\u007f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g,
    (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`);
  return shown.replace(/\t/g, "→\t").replace(/\n/g, "↵\n");
}

/** What there is to say of a token, as pairs of name and value. */
export function facts(sample, i) {
  const found = [["token", JSON.stringify(textOf(sample, i))], ["id", sample.token_ids[i]], ["position", i]];
  if (sample.versions[i] < 0) return [...found, ["", "not generated: prompt or tool output"]];
  const about = sample.trained, logprob = sample.logprobs[i];
  found.push(["version", `v${sample.versions[i]}`], ["log-prob", `${fixed(logprob)} (${percent(Math.exp(logprob))})`]);
  if (!about) return [...found, ["", sample.loss_mask[i] ? "not trained on, or not written" : "carries no gradient"]];
  found.push(["staleness", about.step - sample.versions[i]], ["gradient", about.loss_mask[i] ? "yes" : "no"]);
  if (!about.loss_mask[i]) return found;
  found.push(["advantage", fixed(about.advantages[i])], ["proximal", fixed(about.prox_logp?.[i])], ["at update", fixed(about.logp[i])]);
  return [...found, ["divergence", `${fixed(about.divergence[i], 4)} (ratio ${fixed(Math.exp(about.divergence[i]), 3)})`]];
}

// The list of groups: filters and order stand in the address, so that a view can be kept and sent.

import { get } from "./api.js";
import { h } from "./dom.js";
import { fixed, plural } from "./format.js";

const RANGES = [["reward", "Reward", "any"], ["length", "Length", "1"], ["staleness", "Staleness", "1"], ["step", "Step", "1"]];
const SORTS = { step: "Step", reward: "Reward", length: "Length", staleness: "Staleness" };
const STILL_READING_MS = 1000;

/** The address of a group. */
export function groupAddress(group) {
  const place = new URLSearchParams({ kind: group.kind, step: group.step, attempt: group.attempt });
  return `#/group/${encodeURIComponent(group.task_id)}?${place}`;
}

export class GroupList {
  constructor(main, parameters) {
    this.parameters = parameters;
    this.rows = h("tbody");
    this.count = h("p", { class: "count", role: "status" });
    this.more = h("button", { type: "button", class: "more", hidden: true, onclick: () => this.#load() }, "Show more");
    this.form = this.#filters();
    main.replaceChildren(h("h2", { class: "hidden" }, "Trajectories"), this.form, this.count,
      h("div", { class: "groups" }, h("table", {},
        h("caption", { class: "hidden" }, "Groups of samples"), h("thead", {}, this.#heads()), this.rows)), this.more);
    this.#load();
  }

  close() {
    clearTimeout(this.timer);
    this.isClosed = true;
  }

  #filters() {
    const has = (name) => this.parameters.get(name) ?? "";
    const choice = (name, label, options) => h("label", {}, label, h("select", { name },
      options.map(([value, text]) => h("option", { value, selected: has(name) === value }, text))));
    const range = ([name, label, step]) => h("div", { class: "pair", role: "group", "aria-label": label }, label, h("span", {},
      h("input", { type: "number", step, name: `min_${name}`, value: has(`min_${name}`), placeholder: "from", "aria-label": `${label}, from` }),
      h("input", { type: "number", step, name: `max_${name}`, value: has(`max_${name}`), placeholder: "to", "aria-label": `${label}, to` })));
    const apply = (event) => { event.preventDefault(); this.#apply(); };
    return h("form", { class: "filters", role: "search", "aria-label": "Groups", onsubmit: apply, onchange: apply },
      h("label", { class: "search" }, "Search", h("input", { type: "search", name: "search", value: has("search"), maxlength: 200,
        placeholder: "text of the prompt, or a task's id" })),
      choice("kind", "Made for", [["", "anything"], ["train", "training"], ["evaluation", "evaluation"]]),
      choice("outcome", "Outcome", [["", "any"], ["accepted", "accepted"], ["rejected", "rejected"]]),
      choice("sort", "Sort by", Object.entries(SORTS).map(([value, text]) => [value, text.toLowerCase()])),
      choice("order", "Order", [["desc", "largest first"], ["asc", "smallest first"]]),
      h("button", { type: "submit" }, "Apply"),
      h("details", { open: RANGES.some(([name]) => has(`min_${name}`) || has(`max_${name}`)) },
        h("summary", {}, "Ranges of reward, length, staleness and step"), h("div", { class: "all" }, RANGES.map(range))));
  }

  #heads() {
    const sort = this.parameters.get("sort") ?? "step", order = this.parameters.get("order") ?? "desc";
    const plain = (text, kind) => h("th", { scope: "col", class: kind }, text);
    const sorted = (name) => h("th", { scope: "col", class: "number", "aria-sort": name === sort ? (order === "asc" ? "ascending" : "descending") : null },
      h("button", { type: "button", onclick: () => this.#sortBy(name, name === sort && order === "desc" ? "asc" : "desc") },
        SORTS[name], name === sort ? (order === "asc" ? " ↑" : " ↓") : ""));
    return h("tr", {}, plain("Task"), plain("Prompt"), sorted("step"), sorted("reward"), plain("Range", "number"),
      sorted("length"), sorted("staleness"), plain("Samples", "number"), plain("Outcome"));
  }

  #sortBy(name, order) {
    this.form.elements.sort.value = name;
    this.form.elements.order.value = order;
    this.#apply();
  }

  #apply() {
    const filled = [...new FormData(this.form)].filter(([, value]) => value !== "");
    const query = new URLSearchParams(filled.filter(([name, value]) => !(name === "sort" && value === "step") && !(name === "order" && value === "desc")));
    location.hash = query.size ? `#/groups?${query}` : "#/groups";
  }

  async #load() {
    const query = new URLSearchParams(this.parameters);
    if (this.next) query.set("cursor", this.next);
    this.more.disabled = true;
    const page = await get(`/v1/groups?${query}`);
    if (this.isClosed) return;
    const firstNew = this.rows.children.length;
    this.rows.append(...page.groups.map(row));
    if (this.next) this.rows.children[firstNew]?.querySelector("a").focus();
    this.next = page.next;
    this.more.hidden = page.next === null;
    this.more.disabled = false;
    this.count.textContent = page.note || [plural(page.total, "group"), this.rows.children.length < page.total ? `, ${this.rows.children.length} shown` : "",
      page.unread_bytes ? `. The dumps are being read: ${(page.unread_bytes / 1e6).toFixed(0)} MB to go.` : ""].join("");
    if (page.unread_bytes && !this.timer) this.timer = setTimeout(() => this.#again(), STILL_READING_MS);
  }

  /** The index has grown meanwhile: begin anew. */
  #again() {
    this.timer = null;
    if (this.isClosed) return;
    this.next = null;
    this.rows.replaceChildren();
    this.#load();
  }
}

function row(group) {
  const cell = (name, value, kind) => h("td", { class: kind, "data-name": name }, value);
  const spread = group.reward_min === group.reward_max ? fixed(group.reward_min, 2) : `${fixed(group.reward_min, 2)} – ${fixed(group.reward_max, 2)}`;
  return h("tr", {},
    h("td", { "data-name": "task" }, h("a", { href: groupAddress(group) }, group.task_id), group.kind === "evaluation" ? [" ", h("span", { class: "chip" }, "evaluation")] : null,
      group.attempt > 1 ? ` attempt ${group.attempt}` : null),
    h("td", { class: "prompt", title: group.prompt }, group.prompt),
    cell("step", group.step, "number"), cell("reward", fixed(group.reward), "number"), cell("range", spread, "number"),
    cell("length", fixed(group.length, 1), "number"), cell("staleness", group.staleness ?? "–", "number"), cell("samples", group.num_samples, "number"),
    h("td", {}, h("span", { class: `chip ${group.outcome === "accepted" ? "" : "warn"}` }, group.outcome)));
}

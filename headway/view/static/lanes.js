// What each engine and the trainer did lately: a lane each, read with the pointer or the arrow keys.

import { h, s } from "./dom.js";
import { clock, percent, seconds } from "./format.js";

/** State of a span: how it is shown, and what it counts as. */
const KINDS = {
  busy: ["f1", "busy"], running: ["f3", "evaluating"], evaluate: ["f3", "evaluating"], waiting: ["f6", "waiting"],
  idle: ["f6", "waiting"], wait_for_batch: ["f6", "waiting"], standby: ["f6", "waiting"],
  updating: ["f2", "updating weights"], write: ["f2", "updating weights"], publish: ["f2", "updating weights"],
  joining: ["f2", "updating weights"], lost: ["f5", "lost"], leaving: ["f4", "other"], checkpoint: ["f4", "other"],
  save: ["f4", "other"], starting: ["f4", "other"], finished: ["f6", "waiting"], commit: ["f4", "other"], log: ["f4", "other"],
};
const BUSY = ["f1", "busy"];
const WINDOWS = [["1 min", 60], ["5 min", 300], ["30 min", 1800], ["all", Infinity]];

export class Lanes {
  /** `look` hears how many seconds are to be shown. */
  constructor(look) {
    this.lanes = h("div", { class: "lanes" });
    this.readout = h("p", { class: "readout", "aria-live": "polite" });
    this.window = h("select", { "aria-label": "How far back", onchange: () => { look(Number(this.window.value)); this.#draw(); } },
      WINDOWS.map(([name, length]) => h("option", { value: length, selected: length === 60 }, name)));
    const shown = [["f1", "busy"], ["f2", "updating weights"], ["f3", "evaluating"], ["f6", "waiting"], ["f4", "other"], ["f5", "lost"]];
    const legend = h("ul", { class: "legend" }, shown.map(([colour, name]) => h("li", {}, h("span", { class: `swatch ${colour}` }), name)));
    this.element = h("div", {}, legend, this.lanes, this.readout);
  }

  /** timeline: {now, lanes: [{name, kind, spans: [{state, detail, begin, end}]}]}; of a run that is over, all is shown at first. */
  set(timeline, isOver) {
    if (!this.timeline && isOver) this.window.value = Infinity;
    this.timeline = timeline;
    this.#draw();
  }

  #draw() {
    if (!this.timeline) return;
    const { now, lanes } = this.timeline;
    const first = Math.min(now, ...lanes.flatMap((lane) => lane.spans.slice(0, 1).map((span) => span.begin)));
    const from = Math.max(first, now - Number(this.window.value));
    const kept = this.lanes.contains(document.activeElement) ? document.activeElement.dataset.lane : null;
    this.lanes.replaceChildren(
      ...lanes.filter((lane) => lane.kind !== "wait" || lane.spans.length).flatMap((lane) => [
        h("span", {}, lane.name), this.#lane(lane, from, now)]),
      h("span", {}), h("span", { class: "times" }, h("span", {}, clock(from)), h("span", {}, `${seconds(now - from)} shown`), h("span", {}, clock(now))),
    );
    if (kept !== null) this.lanes.querySelector(`[data-lane="${CSS.escape(kept)}"]`)?.focus();
  }

  #lane(lane, from, now) {
    const spans = lane.spans.filter((span) => (span.end ?? now) > from && span.begin < now);
    const x = (at) => (100 * (Math.max(at, from) - from)) / (now - from || 1);
    let at = spans.length;
    const svg = s("svg", {
      role: "img", tabindex: "0", "data-lane": lane.name, "aria-label": `${lane.name}: ${inWords(spans, from, now)}`,
      onpointermove: (event) => {
        const box = svg.getBoundingClientRect();
        const when = from + ((event.clientX - box.left) / box.width) * (now - from);
        this.#tell(lane, spans.findLast((span) => span.begin <= when && (span.end ?? now) >= when), now);
      },
      onpointerleave: () => { this.readout.textContent = ""; },
      onkeydown: (event) => {
        const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: spans.length - 1 }[event.key];
        if (next === undefined || !spans.length) return;
        event.preventDefault();
        at = Math.max(0, Math.min(spans.length - 1, next));
        this.#tell(lane, spans[at], now);
      },
    }, spans.map((span) => s("rect", {
      class: kindOf(span)[0], x: `${x(span.begin)}%`, y: 0, height: "100%",
      width: `${Math.max(0.12, x(span.end ?? now) - x(span.begin))}%`,
    })));
    return svg;
  }

  #tell(lane, span, now) {
    if (!span) return;
    const detail = span.detail ? `, ${span.detail}` : "";
    this.readout.textContent =
      `${lane.name} · ${span.state.replaceAll("_", " ")}${detail} · ${seconds((span.end ?? now) - span.begin)} from ${clock(span.begin)}`;
  }
}

function kindOf(span) {
  return KINDS[span.state] ?? BUSY;
}

function inWords(spans, from, now) {
  const shares = new Map();
  for (const span of spans) {
    const [, kind] = kindOf(span);
    shares.set(kind, (shares.get(kind) ?? 0) + (span.end ?? now) - Math.max(span.begin, from));
  }
  const parts = [...shares].sort((a, b) => b[1] - a[1]).map(([kind, length]) => `${kind} ${percent(Math.min(1, length / (now - from || 1)))}`);
  return `${parts.join(", ") || "nothing"} of the last ${seconds(now - from)}`;
}

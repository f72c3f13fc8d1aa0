// Bars: a list of amounts, and how old tokens were against the bound.

import { h, s, table } from "./dom.js";
import { count, percent } from "./format.js";
import { ticks } from "./charts.js";

/** rows: [{name, value, text, why, colour}], drawn against the largest, or against `of`. */
export function bars(rows, { of, label }) {
  const most = of ?? Math.max(...rows.map((row) => row.value), 1e-12);
  return h("div", { class: "bars", role: "list", "aria-label": label }, rows.map((row) => [
    h("span", { role: "listitem" }, row.name, h("span", { class: "hidden" }, `: ${row.text}`)),
    h("span", { class: `track ${row.colour ?? "c1"}`, "aria-hidden": "true" },
      h("span", { class: "fill", style: { display: "block", width: `${Math.min(100, (100 * row.value) / most)}%` } })),
    h("span", { class: "number", "aria-hidden": "true" }, row.text),
    row.why ? h("span", { class: "why" }, row.why) : null,
  ]));
}

const MARGIN = { left: 44, right: 8, top: 16, bottom: 22 };

/** Tokens by their staleness; what lies beyond the bound stands out. */
export class StalenessChart {
  constructor(height = 190) {
    this.height = height;
    this.svg = s("svg", { class: "chart", height, role: "img" });
    this.legend = h("ul", { class: "legend" });
    this.details = h("details", { class: "data" }, h("summary", {}, "As a table"));
    this.element = h("div", {}, this.legend, this.svg, h("p", { class: "readout" }, "staleness in versions at consumption"), this.details);
    new ResizeObserver(() => this.#draw()).observe(this.svg);
  }

  /** gradient, masked: {staleness: tokens}; eta: the bound. */
  set(gradient, masked, eta) {
    const ages = Math.max(eta + 1, ...Object.keys(gradient).map(Number), ...Object.keys(masked).map(Number)) + 1;
    this.eta = eta;
    this.rows = Array.from({ length: ages }, (_, age) => ({ age, used: gradient[age] ?? 0, lost: masked[age] ?? 0 }));
    this.total = this.rows.reduce((sum, row) => sum + row.used + row.lost, 0);
    const said = this.rows.filter((row) => row.used + row.lost).map((row) => `${count(row.used + row.lost)} at ${row.age}`);
    this.svg.setAttribute("aria-label", `Tokens by staleness, bound ${eta}: ${said.join(", ") || "none yet"}`);
    const hasLost = Object.keys(masked).length > 0;
    this.legend.replaceChildren(
      h("li", {}, h("span", { class: "swatch c1" }), "carried gradient"),
      ...(hasLost ? [h("li", {}, h("span", { class: "swatch c4" }), "lost it, too old")] : []),
      h("li", {}, `bound ${eta}`),
    );
    this.details.replaceChildren(this.details.firstElementChild, h("div", { class: "scroll" }, table("Tokens by staleness",
      ["staleness", "carried gradient", "masked"], this.rows.map((row) => [row.age, row.used, row.lost]))));
    this.#draw();
  }

  #draw() {
    if (!this.rows) return;
    const width = Math.max(120, this.svg.clientWidth) - MARGIN.left - MARGIN.right;
    const tall = this.height - MARGIN.top - MARGIN.bottom, base = MARGIN.top + tall;
    const most = Math.max(1, ...this.rows.map((row) => row.used + row.lost));
    const marks = ticks(0, most, 3), top = marks.at(-1);
    const slot = width / this.rows.length, thick = Math.min(56, slot * 0.62);
    const y = (value) => (value / top) * tall;
    const bar = (row, from, size, colour) =>
      s("rect", { class: colour, x: MARGIN.left + slot * (row.age + 0.5) - thick / 2, width: thick, y: base - y(from + size), height: y(size), rx: 2 });
    const bound = MARGIN.left + slot * (this.eta + 1);
    this.svg.replaceChildren(
      ...marks.map((mark) => s("line", { class: "grid", x1: MARGIN.left, x2: MARGIN.left + width, y1: base - y(mark), y2: base - y(mark) })),
      ...marks.map((mark) => s("text", { x: MARGIN.left - 6, y: base - y(mark) + 4, "text-anchor": "end" }, count(mark).replace(" ", ""))),
      ...this.rows.flatMap((row) => [
        row.used ? bar(row, 0, row.used, row.age > this.eta ? "f5" : "f1") : null,
        row.lost ? bar(row, row.used, row.lost, "f4") : null,
        s("text", { x: MARGIN.left + slot * (row.age + 0.5), y: this.height - 5, "text-anchor": "middle" }, String(row.age)),
        row.used + row.lost ? s("text", { x: MARGIN.left + slot * (row.age + 0.5), y: base - y(row.used + row.lost) - 4, "text-anchor": "middle" },
          percent((row.used + row.lost) / this.total)) : null,
      ].filter(Boolean)),
      s("line", { class: "axis", x1: MARGIN.left, x2: MARGIN.left + width, y1: base, y2: base }),
      s("line", { class: "bound", x1: bound, x2: bound, y1: 2, y2: base }),
      s("text", { x: bound + 4, y: 10 }, "bound"),
    );
  }
}


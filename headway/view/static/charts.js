// Curves over steps: drawn as SVG, read with the pointer or the arrow keys, and as a table.

import { h, s, table } from "./dom.js";

const MARGIN = { left: 44, right: 12, top: 10, bottom: 22 };
const MAX_POINTS = 800;
const MAX_ROWS = 200;

/** A chart of several series; `set` gives it its points, and may be called again and again. */
export class LineChart {
  constructor({ label, height = 190, format = (y) => y.toPrecision(3), low, high }) {
    Object.assign(this, { label, height, format, low, high, series: [], at: null });
    this.svg = s("svg", {
      class: "chart", height, role: "img", tabindex: "0", "aria-label": label,
      onpointermove: (event) => this.#point(event), onpointerleave: () => this.#move(null),
      onkeydown: (event) => this.#key(event), onblur: () => this.#move(null),
    });
    this.legend = h("ul", { class: "legend" });
    this.readout = h("p", { class: "readout", "aria-live": "polite" });
    this.details = h("details", { class: "data", ontoggle: () => this.#fillTable() }, h("summary", {}, "As a table"));
    this.element = h("div", {}, this.legend, this.svg, this.readout, this.details);
    new ResizeObserver(() => this.#draw()).observe(this.svg);
  }

  /** series: [{name, colour: "c1", points: [[x, y]], kind: "line" | "dots" | "faint" | "dashed"}] */
  set(series) {
    this.series = series.filter((one) => one.points.length);
    this.legend.replaceChildren(...(series.length > 1 ? this.series.map(key) : []));
    this.svg.setAttribute("aria-label", `${this.label}. ${this.series.map(inWords, this).join(" ")}`);
    this.#draw();
    this.#fillTable();
  }

  #scales() {
    const xs = this.series.flatMap((one) => [one.points[0][0], one.points.at(-1)[0]]);
    const ys = this.series.flatMap((one) => extent(one.points));
    const low = Math.min(this.low ?? Infinity, ...ys), high = Math.max(this.high ?? -Infinity, ...ys);
    const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
    const width = Math.max(120, this.svg.clientWidth) - MARGIN.left - MARGIN.right;
    const tall = this.height - MARGIN.top - MARGIN.bottom;
    const yTicks = ticks(low, high === low ? low + 1 : high, 4);
    const y0 = Math.min(low, yTicks[0]), y1 = Math.max(high, yTicks.at(-1));
    return {
      x: (x) => MARGIN.left + (x1 === x0 ? width / 2 : ((x - x0) / (x1 - x0)) * width),
      y: (y) => MARGIN.top + tall - ((y - y0) / (y1 - y0 || 1)) * tall,
      xTicks: ticks(x0, x1, Math.max(2, Math.floor(width / 80))).filter((x) => x >= x0 && x <= x1 && Number.isInteger(x)),
      yTicks, width, bottom: MARGIN.top + tall,
    };
  }

  #draw() {
    if (!this.series.length) return this.svg.replaceChildren(empty(this.svg, this.height));
    const scale = (this.scale = this.#scales());
    const right = MARGIN.left + scale.width;
    this.overlay = s("g");
    this.svg.replaceChildren(
      ...scale.yTicks.map((y) => s("line", { class: "grid", x1: MARGIN.left, x2: right, y1: scale.y(y), y2: scale.y(y) })),
      ...scale.yTicks.map((y) => s("text", { x: MARGIN.left - 6, y: scale.y(y) + 4, "text-anchor": "end" }, short(y))),
      ...scale.xTicks.map((x) => s("text", { x: scale.x(x), y: this.height - 5, "text-anchor": "middle" }, String(x))),
      s("line", { class: "axis", x1: MARGIN.left, x2: right, y1: scale.bottom, y2: scale.bottom }),
      ...this.series.map((one) => curve(one, scale)),
      this.overlay,
    );
    this.#move(this.at);
  }

  #point(event) {
    if (!this.series.length) return;
    const x = event.clientX - this.svg.getBoundingClientRect().left;
    const xs = this.#steps();
    this.#move(xs.reduce((best, one) => (Math.abs(this.scale.x(one) - x) < Math.abs(this.scale.x(best) - x) ? one : best)));
  }

  #key(event) {
    const xs = this.#steps();
    const here = this.at === null ? xs.length : xs.indexOf(this.at);
    const next = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: xs.length - 1 }[event.key];
    if (event.key === "Escape") this.#move(null);
    if (next === undefined || !xs.length) return;
    event.preventDefault();
    this.#move(xs[Math.max(0, Math.min(xs.length - 1, next))]);
  }

  #steps() {
    return [...new Set(this.series.flatMap((one) => one.points.map(([x]) => x)))].sort((a, b) => a - b);
  }

  #move(at) {
    this.at = at;
    if (!this.overlay) return;
    if (at === null) {
      this.overlay.replaceChildren();
      this.readout.textContent = "";
      return;
    }
    const { x, y, bottom } = this.scale;
    const found = this.series.map((one) => [one, one.points.find((point) => point[0] === at)]).filter(([, point]) => point);
    this.overlay.replaceChildren(
      s("line", { class: "cursor", x1: x(at), x2: x(at), y1: MARGIN.top, y2: bottom }),
      ...found.map(([one, point]) => s("circle", { class: `dot ${one.colour}`, cx: x(at), cy: y(point[1]), r: 3.5 })),
    );
    this.readout.textContent = [`step ${at}`, ...found.map(([one, point]) => `${one.name} ${this.format(point[1])}`)].join(" · ");
  }

  #fillTable() {
    if (!this.details.open) return;
    const steps = this.#steps().slice(-MAX_ROWS);
    const columns = this.series.map((one) => new Map(one.points));
    const rows = steps.reverse().map((step) => [step, ...columns.map((column) => column.get(step) ?? null)]);
    const made = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${this.label}, as a table` },
      table(this.label, ["step", ...this.series.map((one) => one.name)], rows));
    this.details.replaceChildren(this.details.firstElementChild, made);
  }
}

function inWords(one) {
  const [x, y] = one.points.at(-1);
  return `${one.name}: ${this.format(y)} at step ${x}.`;
}

function key(one) {
  return h("li", {}, h("span", { class: `swatch ${one.colour}` }), one.name);
}

function curve(one, scale) {
  const points = thinned(one.points).map(([x, y]) => [scale.x(x), scale.y(y)]);
  if (one.kind === "dots") {
    const dots = points.map(([cx, cy]) => s("circle", { class: `dot ${one.colour}`, cx, cy, r: 3 }));
    return s("g", {}, line(points, `curve ${one.colour}`), ...dots);
  }
  if (points.length === 1) return s("circle", { class: `dot ${one.colour}`, cx: points[0][0], cy: points[0][1], r: 3 });
  return line(points, `curve ${one.colour} ${one.kind ?? ""}`);
}

function line(points, kind) {
  return s("path", { class: kind, d: points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("") });
}

function empty(svg, height) {
  return s("text", { x: svg.clientWidth / 2, y: height / 2, "text-anchor": "middle" }, "nothing yet");
}

/** At most MAX_POINTS of them: means of neighbours where there are more. */
export function thinned(points, most = MAX_POINTS) {
  if (points.length <= most) return points;
  const size = Math.ceil(points.length / most);
  return Array.from({ length: Math.ceil(points.length / size) }, (_, i) => {
    const part = points.slice(i * size, (i + 1) * size);
    return [part.at(-1)[0], part.reduce((sum, [, y]) => sum + y, 0) / part.length];
  });
}

/** The mean over the `width` points up to each. */
export function smoothed(points, width) {
  let sum = 0;
  return points.map(([x, y], i) => {
    sum += y - (i >= width ? points[i - width][1] : 0);
    return [x, sum / Math.min(i + 1, width)];
  });
}

function extent(points) {
  let low = Infinity, high = -Infinity;
  for (const [, y] of points) { low = Math.min(low, y); high = Math.max(high, y); }
  return [low, high];
}

/** Round numbers from at or below `low` to at or above `high`, about `count` steps. */
export function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

function short(value) {
  if (Math.abs(value) >= 1e6) return `${value / 1e6}M`;
  if (Math.abs(value) >= 1e4) return `${value / 1e3}k`;
  return String(value);
}

// Make elements. Text always goes in as text: what a model wrote can never become markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** An HTML element: h("p", {class: "muted"}, "text", otherElement). */
export function h(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** An SVG element. */
export function s(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

/** A table from rows of cells; numbers are set to the right. */
export function table(caption, heads, rows) {
  const cell = (value, tag) => h(tag, { class: typeof value === "number" || tag === "th" ? "number" : null }, shown(value));
  const [first] = rows;
  const isNumber = (column) => first && typeof first[column] === "number";
  return h("table", {},
    h("caption", { class: "hidden" }, caption),
    h("thead", {}, h("tr", {}, heads.map((head, i) => h("th", { scope: "col", class: isNumber(i) ? "number" : null }, head)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((value) => cell(value, "td"))))));
}

function shown(value) {
  if (typeof value !== "number") return value ?? "–";
  return Number.isInteger(value) ? String(value) : value.toPrecision(4);
}

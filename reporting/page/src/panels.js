// What stands beside the graphs: passes, sites, costs, what was searched for, and what was clicked.

import { scaleLog } from "d3-scale";
import { select } from "d3-selection";
import { colourOf, figure, markOf, microseconds } from "./colours.js";
import { mergedNames } from "./data.js";

const MOST_ROWS = 200;

/** Make an element; text is never read as markup. */
export function element(name, options = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== undefined && child !== null));
  return made;
}

function placeOf(path) {
  return path || "(root)";
}

export function passesPanel(picture, state, act) {
  const { passes } = picture.data;
  if (!passes.length) return element("p", { class: "soft" }, "No pass has run: these are the graphs as captured.");
  const gained = Math.max(1e-9, ...passes.map((pass) => pass.saved_us));
  const spent = Math.max(1e-9, ...passes.map((pass) => pass.seconds ?? 0));
  const rows = passes.map((pass, step) => {
    const isIdle = !(pass.applied || pass.undone || pass.refused);
    const counts = ["applied", "undone", "refused"].filter((each) => pass[each]).map((each) => `${pass[each]} ${each}`);
    const bar = (kind, share, text) =>
      element("div", { class: `bar ${kind}`, title: text }, element("i", { style: `width:${share * 100}%` }), text);
    return element(
      "li",
      { class: `row ${step === state.to - 1 ? "current" : ""} ${isIdle ? "idle" : ""}` },
      element(
        "button",
        { class: "link", onclick: () => act.stage(step + 1), title: pass.text },
        element("b", { class: "swatch", style: `background:${colourOf(step)}` }),
        pass.name,
      ),
      element("span", { class: "soft" }, counts.join(", ") || "no place found"),
      pass.saved_us > 0 ? bar("gain", pass.saved_us / gained, `${microseconds(pass.saved_us)} gained`) : undefined,
      pass.seconds && !isIdle ? bar("cost", pass.seconds / spent, `${microseconds(pass.seconds * 1e6)} to prepare`) : undefined,
    );
  });
  return element("ol", { class: "rows" }, ...rows);
}

export function sitesPanel(picture, state, act) {
  const order = { applied: 0, undone: 1, refused: 2, skipped: 3 };
  const chosen = picture.sites.filter(({ status }) => !state.status || status === state.status);
  const sorted = chosen.toSorted((a, b) => order[a.status] - order[b.status] || a.step - b.step);
  const pick = element(
    "select",
    { "aria-label": "status", onchange: (event) => act.status(event.target.value) },
    ...["", "applied", "undone", "refused", "skipped"].map((each) =>
      element("option", { value: each, selected: each === (state.status ?? "") }, each || "all sites"),
    ),
  );
  const rows = sorted.slice(0, MOST_ROWS).map((site) => siteRow(picture, site, act));
  const more = sorted.length > MOST_ROWS ? `and ${sorted.length - MOST_ROWS} more: choose a status or search` : "";
  const note = sorted.length ? more : "None.";
  return element("div", {}, pick, element("ol", { class: "rows" }, ...rows), element("p", { class: "soft" }, note));
}

export function siteRow(picture, site, act) {
  const where = site.label === "(root)" || !site.label ? placeOf(site.graph) : site.label;
  const head = element(
    "button",
    { class: "link", onclick: () => act.site(site), title: where },
    element("b", { class: "swatch round", style: `background:${markOf([site])}` }),
    shortened(where, 60),
  );
  const lowering = site.lowering ? `, as ${site.lowering}` : "";
  const facts = [`${site.pass}: ${site.status}${lowering}`, site.detail, site.reason].filter(Boolean);
  return element("li", { class: "row" }, head, ...facts.map((text) => element("span", { class: "soft" }, text)), figures(site));
}

function figures(site) {
  const rows = [];
  if (site.before_us != null && site.after_us != null) {
    rows.push(["time", `${microseconds(site.before_us)} → ${microseconds(site.after_us)}`]);
  }
  if (site.speedup != null) {
    const range = site.speedup_low == null ? "" : ` (${site.speedup_low.toFixed(2)} to ${site.speedup_high.toFixed(2)})`;
    rows.push(["speed", `${site.speedup.toFixed(2)}x${range}`]);
  }
  if (site.precision_error != null) rows.push(["error", site.precision_error.toExponential(1)]);
  if (site.meaning_error != null) rows.push(["error in float64", site.meaning_error.toExponential(1)]);
  if (site.checked) rows.push(["checked", site.checked]);
  for (const [name, took] of Object.entries(site.lowerings ?? {})) {
    if (took != null) rows.push([name, microseconds(took)]);
  }
  return rows.length ? facts(rows) : undefined;
}

function facts(rows) {
  const cells = rows.flatMap(([title, text]) => [element("dt", {}, title), element("dd", {}, text)]);
  return element("dl", { class: "facts" }, ...cells);
}

/** What is known of a node or a module that was clicked. */
export function detailsPanel(picture, state, box, act) {
  if (!box) return element("p", { class: "soft" }, "Click a node to see its shapes, source, costs and decisions.");
  const { node, child, path, before, after } = box;
  const parts = [element("h3", {}, box.label), element("p", { class: "soft path" }, placeOf(child ?? path))];
  const rows = [["operation", node.op], ["target", node.target]];
  if (node.value) rows.push(["value", node.value]);
  if (node.inputs.length) rows.push(["reads", node.inputs.join(", ")]);
  if (node.source) rows.push(["source", node.source]);
  if (node.madeBy.length) rows.push(["made by", node.madeBy[0]]);
  if (box.step >= 0) rows.push([box.change, `by ${picture.data.passes[box.step].name}`]);
  parts.push(facts(rows));
  const text = picture.data.sources[node.source];
  if (text) parts.push(element("pre", {}, text));
  parts.push(...costRows(picture, box));
  if (child) parts.push(...moduleRows(picture, state, child, act));
  if (!child) parts.push(codeDiff([[before, after]], "code"));
  const sites = [...picture.sitesAt(path, box.name), ...(child ? picture.sitesAt(child) : [])];
  if (sites.length) {
    const rowsOfSites = sites.slice(0, 30).map((site) => siteRow(picture, site, act));
    parts.push(element("h4", {}, "decisions"), element("ol", { class: "rows" }, ...rowsOfSites));
  }
  return element("div", {}, ...parts);
}

function costRows(picture, { path, name, before, after }) {
  const sides = [["before", before], ["after", after]].filter(([side, node]) => node && picture.costOf(path, name, side));
  if (!sides.length) return [];
  const rows = sides.map(([side]) => {
    const [took, flops, moved] = picture.costOf(path, name, side);
    return [side, `${microseconds(took)}, ${figure(flops, "FLOP")}, ${figure(moved, "B")}`];
  });
  return [element("h4", {}, "cost of a call"), facts(rows)];
}

function moduleRows(picture, state, child, act) {
  const [before, after] = picture.data.modules[child] ?? [];
  const sizes = (each) => (each ? `${each[0]}, ${figure(each[1])} parameters, ${figure(each[2], "B")}` : "not there");
  const parts = [facts([["before", sizes(before)], ["after", sizes(after)]])];
  if (!picture.hasGraph(child)) return parts;
  const word = state.open.has(child) ? "close" : "open";
  parts.push(element("button", { onclick: () => act.open(child) }, `${word} ${child.split(".").pop()}`));
  parts.push(variantPick(picture, child, act));
  const [left, right] = [picture.graphAt(child, state.from), picture.graphAt(child, state.to)];
  parts.push(codeDiff(mergedNames(left, right).map((name) => [left?.get(name), right?.get(name)]), "graph"));
  return parts;
}

export function variantPick(picture, path, act) {
  const variants = picture.variants.get(path) ?? [];
  if (variants.length < 2) return undefined;
  const now = picture.graphName(path);
  const options = variants.map((name, number) =>
    element("option", { value: name, selected: name === now }, `graph ${number + 1} of ${variants.length}`),
  );
  return element("select", { "aria-label": "graph", onchange: (event) => act.variant(path, event.target.value) }, ...options);
}

/** Lines of the graph before and after; only what changed, and two lines around it. */
function codeDiff(pairs, title) {
  const lines = pairs.flatMap(([before, after]) => {
    if (before && after && before.line === after.line) return [[" ", after.line]];
    return [...(before ? [["-", before.line]] : []), ...(after ? [["+", after.line]] : [])];
  });
  const isNear = (place) => lines.slice(Math.max(0, place - 2), place + 3).some(([sign]) => sign !== " ");
  const shown = lines.length > 12 && lines.some(([sign]) => sign !== " ") ? lines.filter((_, place) => isNear(place)) : lines;
  const code = shown.slice(0, 400).map(([sign, text]) =>
    element("span", { class: { "+": "added", "-": "removed" }[sign] ?? "same" }, `${sign} ${text}`),
  );
  return element("details", { open: lines.length < 40 }, element("summary", {}, title), element("pre", {}, ...code));
}

/** Modules on the roofline of this machine: operations a byte against operations a second. */
export function rooflinePanel(picture, act) {
  const { costs } = picture.data;
  if (!costs) {
    const text = "No costs were measured. Give example inputs: fxopt.report(model, example_inputs=...), or --report.";
    return element("p", { class: "soft" }, text);
  }
  const { flops: peak, bandwidth } = costs.machine;
  const points = ["before", "after"].flatMap((side) =>
    Object.entries(costs[side].modules)
      .filter(([, [took, flops, moved]]) => took > 0 && flops > 0 && moved > 0)
      .map(([path, [took, flops, moved]]) => ({ side, path, took, x: flops / moved, y: (flops / took) * 1e6 })),
  );
  const [width, height, pad] = [340, 260, 44];
  const xs = points.map(({ x }) => x);
  const ys = points.map(({ y }) => y);
  const x = scaleLog().domain([Math.min(0.1, ...xs) / 2, Math.max(100, ...xs) * 2]).range([pad, width - 8]);
  const y = scaleLog().domain([Math.min(peak / 1e4, ...ys) / 2, Math.max(peak, ...ys) * 2]).range([height - 30, 8]);
  const box = element("div", { class: "roofline" });
  const svg = select(box).append("svg").attr("viewBox", `0 0 ${width} ${height}`);
  const [low, high] = x.domain();
  const ridge = Math.min(high, Math.max(low, peak / bandwidth));
  const roof = [[low, low * bandwidth], [ridge, Math.min(peak, ridge * bandwidth)], [high, Math.min(peak, high * bandwidth)]];
  svg.append("path").attr("class", "roof").attr("d", `M${roof.map(([a, b]) => [x(a), y(Math.max(b, y.domain()[0]))].join()).join("L")}`);
  for (const tick of x.ticks(4).filter((_, i, all) => all.length < 8 || i % 9 === 0)) {
    svg.append("text").attr("class", "tick").attr("x", x(tick)).attr("y", height - 14).text(figure(tick));
  }
  for (const tick of y.ticks(4).filter((_, i, all) => all.length < 8 || i % 9 === 0)) {
    svg.append("text").attr("class", "tick").attr("x", 2).attr("y", y(tick) + 3).text(figure(tick));
  }
  svg.append("text").attr("class", "tick").attr("x", pad).attr("y", height - 2).text("FLOP per byte; up: FLOP per second");
  svg
    .selectAll("circle")
    .data(points)
    .join("circle")
    .attr("class", ({ side }) => `dot ${side}`)
    .attr("cx", (point) => x(point.x))
    .attr("cy", (point) => y(point.y))
    .attr("r", 4)
    .on("click", (_, point) => act.focus(point.path))
    .append("title")
    .text(({ path, side, took, y: reached }) => `${placeOf(path)} ${side}: ${microseconds(took)}, ${figure(reached, "FLOP/s")}`);
  const roofText = `This machine: ${figure(peak, "FLOP/s")} in float32, ${figure(bandwidth, "B/s")}. Hollow: before; filled: after.`;
  return element("div", {}, box, element("p", { class: "soft" }, roofText));
}

function shortened(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

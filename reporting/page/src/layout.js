// Where everything is: each level is placed by itself, an open module is a box around what is inside.

/* global WORKER_SOURCE */

const MOST_PLACED = 400; // nodes of one level that dagre places in good time; more are a list
const DEADLINE = 2500; // milliseconds for one level
const LINE = 46;
const LANE = 26;
const LANES = 8;
const PADDING = 12;
const HEAD = 26;
const LONGEST = 48; // letters of a name that count for the width of its box
const WIDEST = 270;
export const SPARE = 36; // beside the name of a module: its margins, and the sign that opens it
export const HEIGHT = 36;

const FAMILY = "system-ui, sans-serif";
export const FONTS = { module: `600 12px ${FAMILY}`, name: `12px ${FAMILY}`, value: `10.5px ${FAMILY}` }; // as in page.css
const pen = document.createElement("canvas").getContext("2d");
const widths = new Map();

export function fontOf({ node }) {
  return node.op === "call_module" ? FONTS.module : FONTS.name;
}

export class Layout {
  constructor() {
    this.known = new Map();
    this.waiting = new Map();
    this.number = 0;
  }

  /** Place a module's graph, with all that is open inside: boxes and edges relative to its corner. */
  async of(picture, path, state, below = new Set()) {
    const key = [picture.graphName(path), state.from, state.to, state.all, ...openInside(state, path)].join("\n");
    if (!this.known.has(key)) this.known.set(key, this.placed(picture, path, state, below));
    if (this.known.size > 2000) this.known.delete(this.known.keys().next().value);
    return this.known.get(key);
  }

  async placed(picture, path, state, below) {
    const nodes = picture.union(path, state.from, state.to, state.all);
    const inside = new Set([...below, path]);
    const items = await Promise.all(
      nodes.map(async (node) => {
        const isOpen = node.child !== undefined && state.open.has(node.child) && picture.hasGraph(node.child);
        const inner = isOpen && !inside.has(node.child) ? await this.of(picture, node.child, state, inside) : null;
        const [was, label] = [state.from, state.to].map((stage) => labelOf(node, picture, stage));
        return { ...node, label, labels: { before: was, after: label }, inner, ...sizeOf(node, inner, [was, label]) };
      }),
    );
    const place = new Map(items.flatMap((item, number) => (item.members ?? [item.name]).map((name) => [name, number])));
    const edges = edgesOf(items, place);
    const asked = edges.map(({ from, to }) => [from, to]);
    const found = items.length > MOST_PLACED ? listed(items, asked) : await this.ask(items, asked);
    items.forEach((item, number) => ([item.x, item.y] = found.places[number]));
    edges.forEach((edge, number) => (edge.points = found.routes[number]));
    const width = Math.max(60, ...items.map((item) => item.x + item.width));
    const height = Math.max(20, ...items.map((item) => item.y + item.height));
    return { items, edges, width, height };
  }

  /** Let the worker place a level; where it takes too long it is ended, and the level is a list. */
  ask(items, edges) {
    if (!items.length) return Promise.resolve({ places: [], routes: [] });
    const id = (this.number += 1);
    const sizes = items.map(({ width, height }) => ({ width, height }));
    return new Promise((resolve) => {
      const late = setTimeout(() => this.giveUp(), DEADLINE);
      const fallback = () => listed(items, edges);
      this.waiting.set(id, { resolve, late, fallback });
      this.worker().postMessage({ id, items: sizes, edges });
    });
  }

  worker() {
    if (this.running) return this.running;
    const source = URL.createObjectURL(new Blob([WORKER_SOURCE], { type: "text/javascript" }));
    this.running = new Worker(source);
    this.running.onmessage = ({ data }) => {
      const { resolve, late } = this.waiting.get(data.id) ?? {};
      clearTimeout(late);
      this.waiting.delete(data.id);
      resolve?.(data);
    };
    this.running.onerror = () => this.giveUp();
    return this.running;
  }

  giveUp() {
    this.running?.terminate();
    this.running = undefined;
    for (const { resolve, late, fallback } of this.waiting.values()) {
      clearTimeout(late);
      resolve(fallback());
    }
    this.waiting.clear();
  }
}

function openInside(state, path) {
  const head = path ? `${path}.` : "";
  return [...state.open].filter((each) => each.startsWith(head)).sort();
}

export function labelOf({ node, child, members, last: lastOne }, picture, stage) {
  if (members) return `${node.target} … ${lastOne}: ${members.length} ${picture.className(child, stage)}`;
  const last = node.target.split(".").slice(-2).join(".");
  switch (node.op) {
    case "call_module":
      return `${node.target}: ${picture.className(child, stage) || "module"}`;
    case "call_method":
      return `.${node.target}()`;
    case "call_function":
      return last.replace(/^(operator|builtins|functional|_C|nn)\./, "");
    case "get_attr":
      return node.target;
    default:
      return node.op === "output" ? "output" : node.name;
  }
}

/** How wide a text is: letters differ by more than twice. */
export function widthOf(text, font) {
  const known = `${font}\n${text}`;
  if (!widths.has(known)) {
    if (widths.size > 50000) widths.clear();
    pen.font = font;
    widths.set(known, pen.measureText(text).width);
  }
  return widths.get(known);
}

/** As much of a text as there is room for. */
export function fitted(text, room, font) {
  if (widthOf(text, font) <= room) return text;
  let end = Math.floor((text.length * room) / widthOf(text, font));
  while (end > 1 && widthOf(`${text.slice(0, end)}…`, font) > room) end -= 1;
  return `${text.slice(0, end)}…`;
}

function sizeOf(node, inner, labels) {
  const named = labels.map((label) => widthOf(label.slice(0, LONGEST), fontOf(node)));
  const text = Math.max(...named, widthOf((node.node.value || "").slice(0, LONGEST), FONTS.value));
  const width = Math.max(70, Math.min(WIDEST, text) + (node.child ? SPARE : SPARE / 2));
  if (inner === null) return { width, height: HEIGHT };
  return { width: Math.max(width, inner.width + 2 * PADDING), height: inner.height + HEAD + 2 * PADDING };
}

function edgesOf(items, place) {
  const found = new Map();
  items.forEach((item, to) => {
    for (const side of ["before", "after"]) {
      for (const name of item[side]?.inputs ?? []) {
        const from = place.get(name);
        if (from === undefined || from === to) continue;
        const key = `${from} ${to}`;
        if (!found.has(key)) found.set(key, { from, to, before: false, after: false });
        found.get(key)[side] = true;
      }
    }
  });
  return [...found.values()];
}

/** Place nodes one below the other in their order, each in the lane of what it reads where that is free. */
function listed(items, edges) {
  const reads = new Map();
  const lastUse = new Map();
  for (const [from, to] of edges) {
    if (!reads.has(to)) reads.set(to, []);
    reads.get(to).push(from);
    lastUse.set(from, Math.max(lastUse.get(from) ?? 0, to));
  }
  const lanes = [];
  const lane = new Array(items.length).fill(0);
  let y = 0;
  const places = items.map((item, number) => {
    const before = (reads.get(number) ?? []).map((from) => lane[from]);
    const isFree = (each) => lanes[each] === undefined || lanes[each] <= number;
    let own = before.find(isFree);
    if (own === undefined) for (own = 0; own < LANES - 1 && !isFree(own); ) own += 1;
    lane[number] = own;
    lanes[own] = lastUse.get(number) ?? 0;
    const place = [own * LANE, y];
    y += item.height - HEIGHT + LINE;
    return place;
  });
  const routes = edges.map(([from, to]) => {
    const start = [places[from][0] + 14, places[from][1] + items[from].height];
    return [start, [places[to][0] + 14, places[to][1]]];
  });
  return { places, routes };
}

/** All boxes and edges of a layout in one list each, with absolute places; boxes around others come first. */
export function flat(level, x = 0, y = 0, around = { before: true, after: true }, found = { boxes: [], edges: [] }) {
  const on = (item) => ({ before: around.before && item.before, after: around.after && item.after });
  for (const item of level.items) {
    const box = { ...item, ...on(item), x: x + item.x, y: y + item.y };
    found.boxes.push(box);
    if (item.inner) flat(item.inner, box.x + PADDING, box.y + HEAD + PADDING / 2, box, found);
  }
  for (const { points, before, after, from, to } of level.edges) {
    const moved = points.map(([px, py]) => [x + px, y + py]);
    const sides = on({ before, after });
    const box = boundsOf(moved);
    found.edges.push({ ...sides, points: moved, ...box, key: `${level.items[from].path}\n${from}\n${to}` });
  }
  return found;
}

function boundsOf(points) {
  const [xs, ys] = [points.map(([px]) => px), points.map(([, py]) => py)];
  const [x, y] = [Math.min(...xs), Math.min(...ys)];
  return { x, y, width: Math.max(...xs) - x, height: Math.max(...ys) - y };
}

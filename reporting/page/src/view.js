// Two panes on one layout: what is seen is drawn, and both move together.

import { select } from "d3-selection";
import { curveBasis, line } from "d3-shape";
import { zoom, zoomIdentity } from "d3-zoom";
import { FONTS, HEIGHT, SPARE, fitted, flat, fontOf } from "./layout.js";

const MOST_DRAWN = 900; // more boxes at a time are drawn as one shape for each colour, without words
const SIDES = ["before", "after"];
const route = line().curve(curveBasis);

export class View {
  /** `handlers`: pick(box), open(path), paint(box, side) -> {fill, stroke, mark}. */
  constructor(element, handlers) {
    this.handlers = handlers;
    this.level = { boxes: [], edges: [] };
    this.size = { width: 0, height: 0 };
    this.transform = zoomIdentity;
    this.panes = SIDES.map((side) => this.pane(element, side));
    new ResizeObserver(() => this.resized()).observe(element);
  }

  pane(element, side) {
    const frame = select(element).append("div").attr("class", `pane ${side}`);
    const title = frame.append("div").attr("class", "pane-title");
    const svg = frame.append("svg").attr("tabindex", 0).attr("role", "img").attr("aria-label", `graph ${side}`);
    const world = svg.append("g");
    const layers = { frames: world.append("g"), edges: world.append("g"), boxes: world.append("g") };
    const pane = { side, frame, title, svg, world, ...layers };
    pane.zoom = zoom()
      .scaleExtent([0.02, 3])
      .on("zoom", ({ transform, sourceEvent }) => {
        this.transform = transform;
        if (sourceEvent) this.follow(pane);
        this.schedule();
      });
    svg.call(pane.zoom).on("dblclick.zoom", null);
    svg.on("click", (event) => this.clicked(event, false));
    svg.on("dblclick", (event) => this.clicked(event, true));
    return pane;
  }

  follow(moved) {
    for (const pane of this.panes) if (pane !== moved) pane.svg.property("__zoom", this.transform);
  }

  show(layout) {
    this.level = flat(layout);
    this.size = { width: layout.width, height: layout.height };
    const keys = ({ path, name, members }) => (members ?? [name]).map((each) => `${path}\n${each}`);
    this.places = new Map(this.level.boxes.flatMap((box) => keys(box).map((key) => [key, box])));
    this.modules = new Map(this.level.boxes.filter((box) => box.child).map((box) => [box.child, box]));
    this.schedule();
  }

  clicked(event, twice) {
    const element = event.target.closest("[data-key]");
    const box = element ? this.places.get(element.dataset.key) : this.boxAt(event);
    if (box === undefined) return this.handlers.pick(undefined);
    if (box.child && (twice || event.target.closest(".opener"))) return this.handlers.open(box.child);
    return this.handlers.pick(box);
  }

  boxAt(event) {
    const [x, y] = this.transform.invert([event.offsetX, event.offsetY]);
    const inside = (box) => x >= box.x && x <= box.x + box.width && y >= box.y && y <= box.y + box.height;
    return this.level.boxes.findLast(inside);
  }

  resized() {
    const first = this.panes.find(({ frame }) => frame.node().offsetParent !== null) ?? this.panes[0];
    const { width, height } = first.svg.node().getBoundingClientRect();
    this.frame = { width, height };
    this.schedule();
  }

  /** Show all of it, or so much that words can be read, from the top. */
  fit() {
    if (!this.frame?.width) this.resized();
    const { width, height } = this.frame;
    const whole = Math.min((width - 40) / this.size.width, (height - 60) / this.size.height, 1.2);
    const scale = Math.max(whole, Math.min(0.8, (width - 40) / this.size.width), 0.3);
    const first = this.level.boxes[0] ?? { x: 0, width: 0 };
    const isWide = this.size.width * scale > width - 20;
    const middle = isWide ? first.x + first.width / 2 : this.size.width / 2;
    this.move(zoomIdentity.translate(width / 2 - middle * scale, 40).scale(scale));
  }

  center(box) {
    const { width, height } = this.frame;
    const scale = Math.max(0.7, Math.min(1.2, this.transform.k));
    const top = box.inner ? Math.min(box.height, height / scale / 2) : box.height;
    const x = width / 2 - (box.x + Math.min(box.width, width / scale) / 2) * scale;
    this.move(zoomIdentity.translate(x, height / 2 - (box.y + top / 2) * scale).scale(scale));
  }

  by(factor) {
    const { width, height } = this.frame;
    const [x, y] = this.transform.invert([width / 2, height / 2]);
    const scale = Math.max(0.02, Math.min(3, this.transform.k * factor));
    this.move(zoomIdentity.translate(width / 2 - x * scale, height / 2 - y * scale).scale(scale));
  }

  move(transform) {
    this.transform = transform;
    for (const pane of this.panes) pane.svg.property("__zoom", transform);
    this.schedule();
  }

  schedule() {
    this.asked ??= requestAnimationFrame(() => {
      this.asked = undefined;
      this.draw();
    });
  }

  draw() {
    if (!this.frame) return;
    const { x, y, k } = this.transform;
    const margin = 60;
    const [left, top] = [(-x - margin) / k, (-y - margin) / k];
    const [right, bottom] = [(this.frame.width - x + margin) / k, (this.frame.height - y + margin) / k];
    const isSeen = (box) => box.x < right && box.y < bottom && box.x + box.width > left && box.y + box.height > top;
    const boxes = this.level.boxes.filter(isSeen);
    const edges = this.level.edges.filter(isSeen);
    for (const pane of this.panes) {
      pane.world.classed("heated", this.handlers.isHeated());
      pane.world.attr("transform", `translate(${x},${y}) scale(${k})`);
      if (pane.frame.node().offsetParent === null) continue;
      const isIn = (item) => Boolean(item[pane.side]);
      const far = boxes.length > MOST_DRAWN || k < 0.12;
      this.drawEdges(pane, far ? [] : edges.filter(isIn));
      const shown = boxes.filter(isIn);
      this.drawShapes(pane, far ? shown : []);
      this.drawBoxes(pane, pane.frames, far ? [] : shown.filter(({ inner }) => inner));
      this.drawBoxes(pane, pane.boxes, far ? [] : shown.filter(({ inner }) => !inner));
    }
  }

  drawEdges(pane, edges) {
    pane.edges
      .selectAll("path")
      .data(edges, (edge) => edge.key)
      .join("path")
      .attr("class", "edge")
      .attr("d", ({ points }) => route(points));
  }

  /** From far away: one path for each colour. */
  drawShapes(pane, boxes) {
    const byColour = new Map();
    for (const box of boxes) {
      const { fill } = this.handlers.paint(box, pane.side);
      const shape = `M${box.x},${box.y}h${box.width}v${box.height}h${-box.width}z`;
      byColour.set(fill, (byColour.get(fill) ?? "") + shape);
    }
    pane.boxes
      .selectAll("path.far")
      .data([...byColour], ([colour]) => colour)
      .join("path")
      .attr("class", "far")
      .attr("d", ([, shape]) => shape)
      .style("fill", ([colour]) => colour);
  }

  drawBoxes({ side }, layer, boxes) {
    const { paint } = this.handlers;
    const drawn = layer
      .selectAll("g.box")
      .data(boxes, (box) => `${box.path}\n${box.name}`)
      .join((entered) => {
        const group = entered.append("g").attr("data-key", (box) => `${box.path}\n${box.name}`);
        group.append("rect").attr("rx", 5);
        group.append("text").attr("class", "label").attr("x", 9).attr("y", 15);
        group.append("text").attr("class", "value").attr("x", 9).attr("y", 29);
        group.append("text").attr("class", "opener").attr("y", 16);
        group.append("circle").attr("class", "mark").attr("r", 4.5);
        group.append("title");
        return group;
      })
      .order()
      .attr("transform", ({ x, y }) => `translate(${x},${y})`)
      .attr("class", (box) => boxClass(box, this.handlers.isPicked(box)));
    const room = ({ width, child }) => width - (child ? SPARE - 4 : SPARE / 2 - 2);
    drawn
      .select("rect")
      .attr("width", ({ width }) => width)
      .attr("height", ({ height }) => height)
      .style("fill", (box) => paint(box, side).fill)
      .style("stroke", (box) => paint(box, side).stroke);
    drawn.select(".label").text((box) => fitted(box.labels[side], room(box), fontOf(box)));
    drawn.select(".value").text((box) => (box.inner ? "" : fitted(box[side].value || note(box), room(box), FONTS.value)));
    drawn
      .select(".opener")
      .attr("x", ({ width }) => width - 16)
      .text(({ child, inner }) => (child && this.handlers.canOpen(child) ? (inner ? "−" : "+") : ""));
    drawn
      .select(".mark")
      .attr("cx", ({ width }) => width - 3)
      .attr("cy", 3)
      .style("display", (box) => (paint(box, side).mark ? null : "none"))
      .style("fill", (box) => paint(box, side).mark);
    drawn.select("title").text((box) => `${box.labels[side]}${box.node.source ? `\n${box.node.source}` : ""}`);
  }
}

function note({ node }) {
  return node.op === "placeholder" ? "input" : "";
}

function boxClass({ node, change, inner, height }, isPicked) {
  const kinds = ["box", node.op, change, inner ? "open" : "", isPicked ? "picked" : "", height > HEIGHT ? "tall" : ""];
  return kinds.filter(Boolean).join(" ");
}

// The page: its state, what one can do, and the address that keeps it.

import { HEATS, colourOf, heatScale, markOf } from "./colours.js";
import { Picture, decoded, parentOf } from "./data.js";
import { Layout } from "./layout.js";
import { detailsPanel, element, passesPanel, rooflinePanel, siteRow, sitesPanel, variantPick } from "./panels.js";
import { Search } from "./search.js";
import { View } from "./view.js";

const TABS = { passes: "Passes", sites: "Sites", costs: "Costs", details: "Details" };
const KEYS = [
  ["/", "search"],
  ["← →", "the pass before, the pass behind"],
  ["+ −", "closer, farther"],
  ["0", "all of it"],
  ["↑ ↓", "the node before, the node behind"],
  ["Enter", "open or close the module"],
  ["Esc", "let go of what was picked"],
];

class Page {
  constructor(root, picture) {
    this.picture = picture;
    this.layout = new Layout();
    this.state = {
      to: picture.stages, open: new Set(), all: false, heat: "none", picked: undefined, tab: "passes",
      status: "", panes: innerWidth < 760 || !picture.stages ? "after" : "both", step: false,
      get from() {
        return this.step ? Math.max(0, this.to - 1) : 0;
      },
    };
    this.build(root);
    this.view = new View(this.parts.panes, {
      paint: (box, side) => this.paint(box, side),
      pick: (box) => this.pick(box),
      open: (path) => this.open(path),
      isHeated: () => this.heat !== undefined,
      canOpen: (path) => picture.hasGraph(path),
      isPicked: (box) => this.state.picked?.path === box.path && this.state.picked?.name === box.name,
    });
    this.read(location.hash);
    addEventListener("hashchange", () => location.hash !== this.hash && (this.read(location.hash), this.refresh()));
    addEventListener("keydown", (event) => this.key(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.view.schedule());
    this.ready = this.refresh(true);
  }

  build(root) {
    const { picture, state } = this;
    const { data } = picture;
    const on = (change) => (event) => change(event.target);
    const stage = element("input", {
      type: "range", min: 0, max: picture.stages, value: state.to, "aria-label": "stage",
      oninput: on((input) => this.stage(Number(input.value))),
    });
    const heat = element(
      "select",
      { "aria-label": "colour", onchange: on((input) => this.set({ heat: input.value })) },
      ...Object.entries(HEATS)
        .filter(([key]) => data.costs || !["time", "flops", "bytes"].includes(key))
        .map(([key, { title }]) => element("option", { value: key }, title)),
    );
    const from = element(
      "select",
      { "aria-label": "compare with", onchange: on((input) => this.set({ step: input.value === "step" })) },
      element("option", { value: "first" }, "beside the original"),
      element("option", { value: "step" }, "beside the pass before"),
    );
    const all = element("input", { type: "checkbox", onchange: on((input) => this.set({ all: input.checked })) });
    const search = element("input", {
      type: "search", placeholder: "search  /", "aria-label": "search", oninput: on((input) => this.find(input.value)),
    });
    const panes = ["before", "both", "after"].map((each) =>
      element("button", { "data-panes": each, onclick: () => this.set({ panes: each }) }, each),
    );
    const theme = element("button", { title: "light or dark", onclick: () => this.theme() }, "◐");
    const label = element("output", { class: "stage-name" });
    const tabs = Object.entries(TABS).map(([key, title]) =>
      element("button", { role: "tab", "data-tab": key, onclick: () => this.tab(key) }, title),
    );
    this.parts = {
      stage, heat, from, all, search, label, tabs, panes: element("div", { class: "panes" }), panel: element("div", { class: "panel" }),
      variant: element("span", {}), choose: panes,
    };
    const bar = element(
      "div",
      { class: "bar-top" },
      element("span", { class: "group stages" }, stage, label),
      picture.stages > 1 ? from : undefined,
      heat,
      element("label", {}, all, "all nodes"),
      this.parts.variant,
      element("span", { class: "group choose" }, ...panes),
      element("span", { class: "group" }, ...this.zoomButtons(), theme),
      search,
    );
    const side = element("aside", {}, element("div", { role: "tablist", class: "tabs" }, ...tabs), this.parts.panel);
    root.append(bar, element("div", { class: "stage" }, this.parts.panes, side));
  }

  zoomButtons() {
    return [
      element("button", { title: "closer", onclick: () => this.view.by(1.4) }, "+"),
      element("button", { title: "farther", onclick: () => this.view.by(1 / 1.4) }, "−"),
      element("button", { title: "all of it", onclick: () => this.view.fit() }, "fit"),
    ];
  }

  // -- what one can do ---------------------------------------------------------------------------------------------

  set(changes) {
    Object.assign(this.state, changes);
    return this.refresh();
  }

  stage(to) {
    return this.set({ to: Math.max(0, Math.min(this.picture.stages, to)) });
  }

  open(path) {
    const open = new Set(this.state.open);
    if (!open.delete(path)) open.add(path);
    return this.set({ open });
  }

  pick(box) {
    this.state.picked = box && { path: box.path, name: box.name };
    if (box) this.state.tab = "details";
    this.write();
    this.panel();
    this.view.schedule();
  }

  tab(tab) {
    this.state.tab = tab;
    this.parts.search.value = "";
    this.panel();
  }

  theme() {
    const { classList } = document.documentElement;
    const isDark = classList.contains("dark") || (!classList.contains("light") && matchMedia("(prefers-color-scheme: dark)").matches);
    classList.remove("dark", "light");
    classList.add(isDark ? "light" : "dark");
    this.view.schedule();
  }

  variant(path, name) {
    this.picture.chosen.set(path, name);
    return this.refresh();
  }

  status(status) {
    this.state.status = status;
    this.panel();
  }

  /** Open what is around a module or a node, and go there. */
  async focus(path, name) {
    const open = new Set(this.state.open);
    const around = name === undefined ? parentOf(path) : path;
    for (let each = around; each; each = parentOf(each)) open.add(each);
    const isModule = name === undefined;
    Object.assign(this.state, { open, picked: isModule ? undefined : { path, name } });
    if (isModule && !path) return this.refresh();
    await this.refresh();
    const box = isModule ? this.view.modules.get(path) : this.view.places.get(`${path}\n${name}`);
    if (box) {
      this.pick(box);
      this.view.center(box);
      return undefined;
    }
    if (!this.state.all && !isModule) {
      this.parts.all.checked = true;
      this.state.all = true;
      return this.focus(path, name);
    }
    return undefined;
  }

  site(site) {
    const [path, number] = site.graph.split("#");
    if (number) this.picture.chosen.set(path, site.graph);
    const graphs = (this.picture.data.history[site.graph] ?? []).map(([, each]) => this.picture.graphs[each]);
    const name = site.nodes.find((node) => graphs.some((graph) => graph.has(node)));
    return this.focus(path, name);
  }

  find(query) {
    this.search ??= new Search(this.picture);
    if (!query.trim()) return this.panel();
    const rows = this.search.find(query).map((entry) =>
      entry.kind === "site"
        ? siteRow(this.picture, entry.site, this)
        : element(
            "li",
            { class: "row" },
            element("button", { class: "link", onclick: () => this.focus(entry.path, entry.name) }, entry.label),
            element("span", { class: "soft" }, entry.more ?? entry.kind),
          ),
    );
    const shown = rows.length ? element("ol", { class: "rows found" }, ...rows) : element("p", { class: "soft" }, "Nothing found.");
    this.parts.panel.replaceChildren(shown);
    return undefined;
  }

  key(event) {
    if (event.target.closest?.("input, select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = {
      "/": () => this.parts.search.focus(),
      ArrowLeft: () => this.stage(this.state.to - 1),
      ArrowRight: () => this.stage(this.state.to + 1),
      ArrowUp: () => this.neighbour(-1),
      ArrowDown: () => this.neighbour(1),
      "+": () => this.view.by(1.4),
      "-": () => this.view.by(1 / 1.4),
      0: () => this.view.fit(),
      Enter: () => this.openPicked(),
      Escape: () => this.pick(undefined),
    }[event.key];
    if (act && !(event.key === "Enter" && event.target.closest?.("button, a, summary"))) {
      event.preventDefault();
      act();
    }
  }

  neighbour(by) {
    const { boxes } = this.view.level;
    const { picked } = this.state;
    const at = boxes.findIndex((box) => picked && box.path === picked.path && box.name === picked.name);
    const next = boxes[Math.max(0, Math.min(boxes.length - 1, at + by))];
    if (next) {
      this.pick(next);
      this.view.center(next);
    }
  }

  openPicked() {
    const box = this.box();
    if (box?.child && this.picture.hasGraph(box.child)) this.open(box.child);
  }

  box() {
    const { picked } = this.state;
    return picked && this.view.places?.get(`${picked.path}\n${picked.name}`);
  }

  // -- what is shown -----------------------------------------------------------------------------------------------

  async refresh(first = false) {
    const { state, parts, picture } = this;
    const turn = (this.turn = (this.turn ?? 0) + 1);
    parts.stage.value = state.to;
    parts.label.textContent = this.stageName();
    parts.heat.value = state.heat;
    parts.from.value = state.step ? "step" : "first";
    parts.all.checked = state.all;
    parts.panes.dataset.panes = state.panes;
    for (const each of parts.choose) each.classList.toggle("on", each.dataset.panes === state.panes);
    parts.variant.replaceChildren(...[variantPick(picture, "", this)].filter(Boolean));
    this.heat = this.heatScales();
    this.write();
    this.panel();
    const layout = await this.layout.of(picture, "", state);
    if (turn !== this.turn) return;
    for (const { side, title } of this.view.panes) title.text(this.paneTitle(side));
    this.view.show(layout);
    this.panel();
    if (first) this.view.fit();
  }

  stageName() {
    const { to } = this.state;
    const { passes } = this.picture.data;
    if (!passes.length) return "as captured";
    return to === 0 ? "the original" : `after ${to} of ${passes.length}: ${passes[to - 1].name}`;
  }

  paneTitle(side) {
    if (side === "after") return this.stageName();
    if (!this.picture.stages) return "as captured";
    return this.state.from === 0 ? "the original" : `before ${this.picture.data.passes[this.state.to - 1].name}`;
  }

  panel() {
    const { picture, state, parts } = this;
    for (const each of parts.tabs) each.setAttribute("aria-selected", String(each.dataset.tab === state.tab));
    const panels = {
      passes: () => passesPanel(picture, state, this),
      sites: () => sitesPanel(picture, state, this),
      costs: () => rooflinePanel(picture, this),
      details: () => detailsPanel(picture, state, this.box(), this),
    };
    parts.panel.replaceChildren(panels[state.tab]());
  }

  heatScales() {
    const { heat } = this.state;
    const { data } = this.picture;
    if (heat === "none") return undefined;
    if (heat === "parameters") return heatScale(Object.values(data.modules).flat().filter(Boolean).map((each) => each[1]));
    if (heat === "error") return heatScale([...this.picture.errors.values()]);
    const { of } = HEATS[heat];
    const costs = ["before", "after"].flatMap((side) => Object.values(data.costs[side].nodes).flatMap((each) => Object.values(each)));
    return heatScale(costs.map(of));
  }

  heatOf(box, side) {
    const { heat } = this.state;
    const { data, errors } = this.picture;
    if (heat === "parameters") return data.modules[box.child]?.[side === "before" ? 0 : 1]?.[1];
    if (heat === "error") return errors.get(box.child) ?? (box.change === "added" ? errors.get(box.path) : undefined);
    const cost = this.picture.costOf(box.path, box.name, side);
    return cost && HEATS[heat].of(cost);
  }

  paint(box, side) {
    const changed = box.change !== "same" && (box.change !== "changed" || side === "after");
    const colour = changed && box.step >= 0 ? colourOf(box.step) : undefined;
    const sites = this.picture.sitesAt(box.path, box.name);
    const mark = markOf(box.child ? [...sites, ...this.picture.sitesAt(box.child)] : sites);
    if (this.heat) return { fill: this.heat(this.heatOf(box, side)), stroke: colour ?? "var(--edge)", mark };
    const fill = colour ? `color-mix(in srgb, ${colour} ${box.change === "removed" ? 12 : 34}%, var(--paper))` : "var(--box)";
    return { fill, stroke: colour ?? "var(--edge)", mark };
  }

  // -- the address -------------------------------------------------------------------------------------------------

  write() {
    const { state } = this;
    const given = new URLSearchParams();
    if (state.to !== this.picture.stages) given.set("stage", state.to);
    if (state.step) given.set("beside", "pass");
    if (state.open.size) given.set("open", [...state.open].join(","));
    if (state.picked) given.set("node", `${state.picked.path}/${state.picked.name}`);
    if (state.heat !== "none") given.set("heat", state.heat);
    if (state.all) given.set("all", 1);
    this.hash = `#${given}`;
    if (location.hash !== this.hash && (location.hash || this.hash !== "#")) {
      try {
        history.replaceState(null, "", this.hash);
      } catch {
        // A page inside of another one may not change its address.
      }
    }
  }

  read(hash) {
    const given = new URLSearchParams(hash.slice(1));
    const { picture, state } = this;
    const stage = Number(given.get("stage") ?? picture.stages);
    state.to = Number.isInteger(stage) ? Math.max(0, Math.min(picture.stages, stage)) : picture.stages;
    state.step = given.get("beside") === "pass";
    state.open = new Set((given.get("open") ?? "").split(",").filter((path) => path && picture.hasGraph(path)));
    state.heat = given.get("heat") in HEATS ? given.get("heat") : "none";
    if (!picture.data.costs && ["time", "flops", "bytes"].includes(state.heat)) state.heat = "none";
    state.all = given.has("all");
    const node = given.get("node");
    const end = node?.lastIndexOf("/") ?? -1;
    state.picked = end < 0 ? undefined : { path: node.slice(0, end), name: node.slice(end + 1) };
    if (state.picked) state.tab = "details";
  }
}

/** Let the browser do what waits: no task should take long. */
function pause() {
  return new Promise((done) => setTimeout(done));
}

async function start() {
  const root = document.getElementById("picture");
  try {
    const data = await decoded(document.getElementById("picture-data").textContent);
    await pause();
    const picture = new Picture(data);
    await pause();
    const page = new Page(root, picture);
    window.picturePage = page;
    await page.ready;
    root.dataset.ready = "true";
    const box = page.box();
    if (box) page.view.center(box);
    const keys = KEYS.flatMap(([key, text]) => [element("kbd", {}, key), element("span", {}, text)]);
    root.append(element("p", { class: "keys soft" }, ...keys));
  } catch (error) {
    root.append(element("p", { class: "soft" }, `The picture cannot be shown here (${error.message}); the tables below have it all.`));
  }
}

start();


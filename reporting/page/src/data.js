// What the page shows: graphs at each stage, and where every decision was taken.

/** Decode base64 of gzip of JSON. */
export async function decoded(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const CALLS = new Set(["call_function", "call_method"]);
const MEMBER = /\.\d+$/;
const LEAST_MEMBERS = 6;
const SMALL = /^(builtins|operator|_operator)\.|guards\./;
const USERS = / : (?:\S+ )?\[num_users=\d+\] = /; // how often a value is read is no change of the node that gives it

export class Picture {
  constructor(data) {
    this.data = data;
    this.stages = data.passes.length; // stage k is the model after its first k passes
    this.graphs = data.graphs.map((nodes) => new Map(nodes.map((node) => [node[0], nodeOf(node, nodes)])));
    this.children = childrenOf(data.modules);
    this.sites = data.sites.map((site, number) => ({ ...site, number }));
    this.sitesOf = grouped(this.sites, (site) => site.graph);
    this.errors = errorsOf(this.sites);
    this.variants = grouped(Object.keys(data.history), (name) => name.split("#")[0]);
    this.chosen = new Map(); // module -> the graph of it that is shown
  }

  /** The name of the graph that a module shows: the one that the profiled call ran, where it was profiled. */
  graphName(path) {
    const chosen = this.chosen.get(path);
    if (chosen !== undefined) return chosen;
    const ran = this.data.costs?.before.nodes ?? {};
    const variants = this.variants.get(path) ?? [];
    return variants.find((name) => name in ran) ?? variants[0];
  }

  /** The graph of a module at a stage, or undefined where it has none then. */
  graphAt(path, stage) {
    const history = this.data.history[this.graphName(path)];
    if (history === undefined) return undefined;
    const found = history.find(([step]) => step === -1 || step >= stage);
    return found === undefined ? undefined : this.graphs[found[1]];
  }

  hasGraph(path) {
    return this.variants.has(path);
  }

  /** The number of the pass that took a node out of a graph between two stages, or made it what it is. */
  stepBetween(path, name, from, to) {
    for (let stage = from; stage < to; stage += 1) {
      const before = this.graphAt(path, stage)?.get(name);
      const after = this.graphAt(path, stage + 1)?.get(name);
      if ((before === undefined) !== (after === undefined) || before?.line !== after?.line) return stage;
    }
    return -1;
  }

  /** The nodes of a module's graphs at two stages, merged; equal names are one node. */
  union(path, from, to, all) {
    const [left, right] = [this.graphAt(path, from), this.graphAt(path, to)];
    const names = mergedNames(left, right);
    const found = [];
    for (const name of names) {
      const [before, after] = [left?.get(name), right?.get(name)];
      const node = after ?? before;
      if (!all && isMinor(node)) continue;
      let change = "same";
      if (before === undefined && left !== undefined) change = "added";
      else if (after === undefined && right !== undefined) change = "removed";
      else if (before !== undefined && after !== undefined && before.line !== after.line) change = "changed";
      let step = change === "same" ? -1 : this.stepBetween(path, name, from, to);
      const child = node.op === "call_module" ? joined(path, node.target) : undefined;
      const replaced = change === "same" && child !== undefined ? this.replacedBy(child) : -1;
      if (replaced >= from && replaced < to) [change, step] = ["changed", replaced];
      found.push({ name, path, before, after, node, change, step, child });
    }
    if (all) return found;
    for (const item of found.filter(({ node }) => node.op === "output")) {
      item.before &&= readingThrough(left, item.before);
      item.after &&= readingThrough(right, item.after);
    }
    return membersAsOne(found);
  }

  /** Costs of a node or a module on one side: [microseconds, operations, bytes], or undefined. */
  costOf(path, name, side) {
    return this.data.costs?.[side].nodes[this.graphName(path)]?.[name];
  }

  moduleCost(path, side) {
    return this.data.costs?.[side].modules[path];
  }

  /** The class of a module at a stage. */
  className(path, stage = this.stages) {
    const [before, after] = this.data.modules[path] ?? [];
    const isBefore = stage <= this.replacedBy(path);
    return ((isBefore ? before : after) ?? before)?.[0] ?? "";
  }

  /** The number of the pass that put another class into the place of a module, or -1; graphs stay as they are then. */
  replacedBy(path) {
    const [before, after] = this.data.modules[path] ?? [];
    if (!before || !after || before[0] === after[0]) return -1;
    const steps = (this.sitesOf.get(path) ?? []).filter(({ status }) => status === "applied").map(({ step }) => step);
    return steps.length ? Math.max(...steps) : this.stages - 1;
  }

  /** The decisions at a node, or in the whole graph where `name` is undefined. */
  sitesAt(path, name) {
    const sites = this.sitesOf.get(this.graphName(path)) ?? [];
    return name === undefined ? sites : sites.filter((site) => site.nodes.includes(name));
  }

  step(name) {
    return this.data.passes.findIndex((pass) => pass.name === name);
  }
}

function nodeOf([name, op, target, inputs, value, source, line, madeBy], nodes) {
  const reads = inputs.map((place) => nodes[place][0]);
  return { name, op, target, value, source, line: line.replace(USERS, " = "), madeBy, inputs: reads };
}

/** Tensors that are read, numbers that are computed, checks: most of the nodes, and little of the picture. */
function isMinor(node) {
  const isSmall = !node.madeBy.length || node.op === "call_method" || SMALL.test(node.target);
  return node.op === "get_attr" || (CALLS.has(node.op) && !node.value && isSmall);
}

/** A node that reads what the minor nodes do that it reads: a result is often put together by such. */
function readingThrough(graph, node) {
  const reads = (name) => (isMinor(graph.get(name)) ? graph.get(name).inputs.flatMap(reads) : [name]);
  return { ...node, inputs: [...new Set(node.inputs.flatMap(reads))] };
}

/** Members of a list that are called alike are one box: the first, which stands for all. */
function membersAsOne(nodes) {
  const alike = grouped(
    nodes.filter(({ child }) => MEMBER.test(child ?? "")),
    ({ node, child, change, step }) => [child.replace(MEMBER, ""), node.inputs.join(), change, step].join(" "),
  );
  const firsts = new Map();
  for (const members of alike.values()) {
    if (members.length < LEAST_MEMBERS) continue;
    const [first] = members;
    for (const each of members) firsts.set(each.name, first);
    first.members = members.map(({ name }) => name);
    first.last = members.at(-1).node.target;
  }
  return nodes.filter(({ name }) => (firsts.get(name)?.name ?? name) === name);
}

export function joined(path, target) {
  return path ? `${path}.${target}` : target;
}

export function parentOf(path) {
  const end = path.lastIndexOf(".");
  return end < 0 ? "" : path.slice(0, end);
}

/** Names in an order that keeps the order of both graphs where they agree. */
export function mergedNames(left, right) {
  if (left === undefined || right === undefined) return [...(left ?? right ?? new Map()).keys()];
  const names = [];
  const waiting = [...left.keys()];
  let next = 0;
  for (const name of right.keys()) {
    if (left.has(name)) {
      const place = waiting.indexOf(name, next);
      if (place >= 0) {
        while (next < place) {
          if (!right.has(waiting[next])) names.push(waiting[next]);
          next += 1;
        }
        next += 1;
      }
    }
    names.push(name);
  }
  for (; next < waiting.length; next += 1) if (!right.has(waiting[next])) names.push(waiting[next]);
  return names;
}

function grouped(items, key) {
  const found = new Map();
  for (const item of items) {
    const at = key(item);
    if (!found.has(at)) found.set(at, []);
    found.get(at).push(item);
  }
  return found;
}

function childrenOf(modules) {
  return grouped(Object.keys(modules).filter(Boolean), parentOf);
}

/** The largest error of the decisions that stand, by the graph that they are in. */
function errorsOf(sites) {
  const found = new Map();
  for (const site of sites) {
    if (site.status === "applied" && site.precision_error != null) {
      found.set(site.graph, Math.max(found.get(site.graph) ?? 0, site.precision_error));
    }
  }
  return found;
}

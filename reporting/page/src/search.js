// Find modules, nodes, source lines and sites by parts of their names.

const MOST = 60;

export class Search {
  constructor(picture) {
    this.entries = [];
    const add = (text, entry) => this.entries.push({ text: text.toLowerCase(), ...entry });
    const { data } = picture;
    for (const [path, [before, after]] of Object.entries(data.modules)) {
      const kind = (after ?? before)?.[0] ?? "";
      add(`${path} ${kind}`, { kind: "module", path, label: `${path || "(root)"}: ${kind}` });
    }
    for (const [name, history] of Object.entries(data.history)) {
      const path = name.split("#")[0];
      const seen = new Set();
      for (const [, number] of history) {
        for (const node of picture.graphs[number].values()) {
          if (seen.has(node.name)) continue;
          seen.add(node.name);
          const label = `${path || "(root)"} / ${node.name}`;
          add(`${label} ${node.target} ${node.source}`, { kind: "node", path, name: node.name, label, more: node.target });
        }
      }
    }
    for (const site of picture.sites) {
      const text = `${site.pass} ${site.label} ${site.status} ${site.reason} ${site.lowering ?? ""}`;
      add(text, { kind: "site", site, label: `${site.pass} at ${site.label}`, more: site.status });
    }
  }

  /** The first entries that hold every word, modules and sites before nodes. */
  find(query) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return [];
    const found = { module: [], site: [], node: [] };
    for (const entry of this.entries) {
      const list = found[entry.kind];
      if (list.length < MOST && words.every((word) => entry.text.includes(word))) list.push(entry);
    }
    return [...found.module, ...found.site, ...found.node].slice(0, MOST);
  }
}

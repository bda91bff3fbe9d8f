// Place the nodes of one level by dagre, away from the page: a large graph takes seconds.
import { Graph, layout } from "@dagrejs/dagre";

self.onmessage = ({ data: { id, items, edges } }) => {
  const graph = new Graph();
  graph.setGraph({ rankdir: "TB", nodesep: 18, ranksep: 26, edgesep: 8, marginx: 0, marginy: 0 });
  graph.setDefaultEdgeLabel(() => ({}));
  items.forEach(({ width, height }, number) => graph.setNode(String(number), { width, height }));
  for (const [from, to] of edges) graph.setEdge(String(from), String(to));
  layout(graph);
  const places = items.map((_, number) => {
    const { x, y, width, height } = graph.node(String(number));
    return [x - width / 2, y - height / 2];
  });
  const routes = edges.map(([from, to]) => graph.edge(String(from), String(to)).points.map(({ x, y }) => [x, y]));
  self.postMessage({ id, places, routes });
};

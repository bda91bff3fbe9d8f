// One colour for each pass, and scales for heat.

import { scaleSequentialLog } from "d3-scale";
import { interpolateYlOrRd, schemeTableau10 } from "d3-scale-chromatic";

const MARKS = { applied: "#2b8a3e", undone: "#d9480f", refused: "#868e96", skipped: "#868e96" };

export function colourOf(step) {
  return step < 0 ? "var(--box)" : schemeTableau10[step % schemeTableau10.length];
}

export function markOf(sites) {
  const worst = ["undone", "refused", "skipped", "applied"].find((each) => sites.some(({ status }) => status === each));
  return MARKS[worst];
}

export const HEATS = {
  none: { title: "colour by pass" },
  time: { title: "measured time", unit: "us", of: (cost) => cost[0] },
  flops: { title: "operations (FLOPs)", unit: "", of: (cost) => cost[1] },
  bytes: { title: "bytes moved", unit: "B", of: (cost) => cost[2] },
  parameters: { title: "parameters", unit: "" },
  error: { title: "error of rewrites", unit: "" },
};

/** A scale over the values that are above zero; nothing has a colour where there is none. */
export function heatScale(values) {
  const given = values.filter((value) => value > 0);
  if (!given.length) return () => "var(--box)";
  const most = Math.max(...given);
  const scale = scaleSequentialLog(interpolateYlOrRd).domain([Math.max(Math.min(...given), most / 1e4), most * 12]);
  return (value) => (value > 0 ? scale(Math.max(value, most / 1e4)) : "var(--box)");
}

export function figure(value, unit = "") {
  if (value === undefined || value === null) return "-";
  const steps = ["", "k", "M", "G", "T"];
  let step = 0;
  let left = value;
  while (Math.abs(left) >= 1000 && step < 4) [left, step] = [left / 1000, step + 1];
  const text = left >= 100 || left === 0 ? left.toFixed(0) : left.toPrecision(3);
  if (unit === "us") return microseconds(value);
  return `${text}${steps[step] || unit ? ` ${steps[step]}${unit}` : ""}`;
}

export function microseconds(value) {
  if (value >= 1e6) return `${(value / 1e6).toPrecision(3)} s`;
  if (value >= 1e3) return `${(value / 1e3).toPrecision(3)} ms`;
  return `${value.toPrecision(3)} us`;
}

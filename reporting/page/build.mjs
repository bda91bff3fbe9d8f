// Bundle the page into dist/: `make page` runs it. The worker is bundled first, for the page carries it as text.
// The first line of each file names its sources by their digest, so that a test can tell whether it is up to date.
import { build } from "esbuild";
import { createHash } from "node:crypto";
import { readFile, readdir, writeFile } from "node:fs/promises";

const shared = { bundle: true, minify: true, target: "es2022", write: false, charset: "utf8" };

async function bundled(entry, options = {}) {
  const built = await build({ ...shared, entryPoints: [entry], format: "iife", legalComments: "eof", ...options });
  return built.outputFiles[0].text;
}

const digest = createHash("sha256");
for (const name of ["../build.mjs", "../package-lock.json", ...(await readdir("src")).sort()]) {
  digest.update(await readFile(`src/${name}`));
}
const head = `/* built of ${digest.digest("hex")} */\n`;
const worker = await bundled("src/layout-worker.js");
const page = await bundled("src/main.js", { define: { WORKER_SOURCE: JSON.stringify(worker) } });
const style = await build({ ...shared, entryPoints: ["src/page.css"] });
// What ends a script element must not stand in one.
await writeFile("dist/page.js", head + page.replaceAll("</script", "<\\/script"));
await writeFile("dist/page.css", head + style.outputFiles[0].text);
console.log(`dist/page.js: ${Math.round(page.length / 1024)} KiB`);

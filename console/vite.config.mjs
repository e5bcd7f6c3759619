// Builds the page into the gateway's package. Names are fixed, so that the gateway has a short list of free paths.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import preact from "@preact/preset-vite";
import { defineConfig } from "vite";

const HERE = import.meta.dirname;
const OUT = join(HERE, "../gateway/mini_infer_gateway/console/assets");
const SOURCES = ["index.html", "package-lock.json", "package.json", "public", "src", "tsconfig.json", "vite.config.mjs"];

/** Returns a hash of all sources; tests/gateway/console/test_build.py computes the same. */
function sourcesHash() {
  const files = SOURCES.flatMap((name) =>
    name.includes(".")
      ? [name]
      : readdirSync(join(HERE, name), { recursive: true, withFileTypes: true })
          .filter((entry) => entry.isFile())
          .map((entry) => join(entry.parentPath, entry.name).slice(HERE.length + 1)),
  );
  const hash = createHash("sha256");
  for (const file of files.sort()) hash.update(`${file}\0`).update(readFileSync(join(HERE, file))).update("\0");
  return hash.digest("hex");
}

const recordSources = {
  name: "record-sources",
  writeBundle({ dir }) {
    writeFileSync(join(dir, "build.json"), `${JSON.stringify({ sources: sourcesHash() })}\n`);
  },
};

export default defineConfig({
  base: "/console/",
  plugins: [preact(), recordSources],
  build: {
    outDir: OUT,
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    cssCodeSplit: false,
    assetsInlineLimit: 0,
    rollupOptions: {
      output: {
        entryFileNames: "console.js",
        assetFileNames: (asset) => (asset.names?.[0]?.endsWith(".css") ? "console.css" : "[name][extname]"),
        inlineDynamicImports: true,
      },
    },
  },
});

"""The page's style sheet: one column of readable width, light or dark as the reader's system asks."""

from __future__ import annotations

CSS = """
:root {
  --paper: #ffffff; --ink: #1d2329; --soft: #5b6670; --line: #dde2e6; --panel: #f5f7f8; --accent: #0b6fa4;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181b; --ink: #dfe5e9; --soft: #98a4ae; --line: #2c343a; --panel: #1c2226; --accent: #6fbdea;
  }
}
* { box-sizing: border-box; }
html { font-size: 16px; -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
  line-height: 1.6;
}
main { max-width: 60rem; margin: 0 auto; padding: 3rem 1.5rem 4rem; }
header, p, nav, dl, .note { max-width: 44rem; }
h1 { font-size: 2rem; line-height: 1.2; letter-spacing: -.015em; margin: 0 0 .5rem; }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 0 0 .75rem; }
p { margin: 0 0 1rem; }
a { color: var(--accent); text-underline-offset: .15em; }
.lead { font-size: 1.1rem; color: var(--soft); }
nav ol { margin: 1.5rem 0 0; padding-left: 1.4rem; color: var(--soft); }
section { border-top: 1px solid var(--line); margin-top: 2.5rem; padding-top: 2rem; }
.note { border-left: 3px solid var(--accent); background: var(--panel); padding: .6rem 1rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.5rem; margin: 0 0 1.25rem; }
dt { color: var(--soft); }
dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: 0 0 1.5rem; }
table { border-collapse: collapse; font-size: .925rem; }
caption { min-width: min(30rem, 85vw); caption-side: top; text-align: left; color: var(--soft); padding-bottom: .5rem; }
th, td {
  text-align: left; vertical-align: baseline; padding: .4rem 1.25rem .4rem 0;
  border-bottom: 1px solid var(--line);
}
th:last-child, td:last-child { padding-right: 0; }
th { vertical-align: bottom; font-weight: 600; color: var(--soft); border-bottom-color: var(--soft); }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th.number { white-space: normal; }
code {
  font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .9em;
}
pre {
  background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: .9rem 1.1rem;
  overflow-x: auto;
}
pre code { font-size: .85rem; line-height: 1.5; }
details { margin: 0 0 1.5rem; }
summary { cursor: pointer; color: var(--accent); margin-bottom: .5rem; }
figure { margin: 0 0 1.75rem; }
figure img {
  display: block; max-width: 100%; height: auto; background: #ffffff;
  border: 1px solid var(--line); border-radius: 6px;
}
figcaption { max-width: 44rem; margin-top: .5rem; font-size: .9rem; color: var(--soft); }
footer {
  border-top: 1px solid var(--line); margin-top: 3rem; padding-top: 1rem; font-size: .9rem;
  color: var(--soft);
}
@media (max-width: 34rem) {
  main { padding: 1.5rem 1rem 2rem; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: .6rem; }
}
@media print { nav { display: none; } section { break-inside: avoid; } main { padding: 0; } }
"""

"""The stylesheet of a page about a run: light and dark, paper, and screens from 400 px."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1f2328; --dim: #59636e; --line: #d1d9e0;
  --card: #f6f8fa; --training: #2da44e; --redoing: #bf8700; --regrouping: #d4a72c;
  --booting: #8c959f; --restarting: #cf222e; --waiting: #6e7781; --stopped: #eaeef2;
  --accent: #0969da; --warning: #9a6700; --error: #cf222e; }
@media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --ink: #f0f6fc; --dim: #9198a1;
  --line: #3d444d; --card: #151b23; --training: #238636; --redoing: #9e6a03;
  --regrouping: #bb8009; --booting: #656c76; --restarting: #da3633; --waiting: #4d5560;
  --stopped: #21262d; --accent: #4493f8; --warning: #d29922; --error: #f85149; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.6rem; margin: .5rem 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
article + article { border-top: 2px solid var(--line); margin-top: 3rem; }
figure, .scroll { margin: 0; overflow-x: auto; }
.tall { max-height: 26rem; overflow-y: auto; }
a { color: var(--accent); } p { margin: .5rem 0; } .dim { color: var(--dim); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr));
  gap: .6rem; }
.figure { background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  padding: .6rem .8rem; }
.figure span { display: block; color: var(--dim); font-size: .8rem; }
.figure strong { font-size: 1.35rem; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0;
  border-bottom: 1px solid var(--line); overflow-wrap: break-word; }
th, td:first-child, .one-line td { white-space: nowrap; }
th { color: var(--dim); font-weight: 600; }
.events td:first-child { white-space: nowrap; color: var(--dim); }
.events td { border: 0; padding-block: .1rem; }
.warning td:nth-child(2) { color: var(--warning); } .error td:nth-child(2) { color: var(--error);
  font-weight: 600; }
.legend span { display: inline-block; margin-right: 1.2rem; font-size: .85rem; }
.legend svg { vertical-align: -2px; }
svg.chart { display: block; width: 100%; min-width: 640px; height: auto;
  font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; }
svg.patterns { position: absolute; }
.chart text { fill: var(--ink); } .chart text.dim { fill: var(--dim); }
.chart text.inside { font-size: 11px; font-weight: 600; paint-order: stroke; stroke: var(--paper);
  stroke-width: 3px; }
.chart .end { text-anchor: end; } .chart .middle { text-anchor: middle; }
.chart .grid { stroke: var(--line); } .chart .paper { fill: var(--paper); }
.envelope { fill: var(--accent); fill-opacity: .25; } .loss { fill: none; stroke: var(--accent);
  stroke-width: 1.5; }
.hatch { stroke: var(--paper); stroke-width: 1.5; fill: none; }
.tone.redoing { fill: var(--redoing); } .tone.regrouping { fill: var(--regrouping); }
.tone.booting { fill: var(--booting); } .tone.restarting { fill: var(--restarting); }
.tone.waiting { fill: var(--waiting); } .tone.stopped { fill: var(--stopped); }
.lane.training { fill: var(--training); } .lane.redoing { fill: url(#fill-redoing); }
.lane.regrouping { fill: url(#fill-regrouping); } .lane.booting { fill: url(#fill-booting); }
.lane.restarting { fill: url(#fill-restarting); } .lane.waiting { fill: url(#fill-waiting); }
.lane.stopped { fill: url(#fill-stopped); }
.part { stroke: var(--paper); } .part.noticing { fill: url(#part-noticing); }
.part.deciding { fill: url(#part-deciding); } .part.forming { fill: url(#part-forming); }
.part.transfer { fill: url(#part-transfer); } .part.redoing { fill: url(#part-redoing); }
@media print { :root { --paper: #fff; --ink: #000; --card: #fff; --line: #bbb; --dim: #444; }
  body { max-width: none; font-size: 11px; } section { break-inside: avoid; }
  .events { font-size: 9px; } section:has(.events) { break-inside: auto; }
  svg.chart { min-width: 0; } figure, .scroll { overflow: visible; } }
"""

"""How the page looks: its colours and its style sheet. Pure."""

from __future__ import annotations

from lightning_gpufeed.diagnose.records import PARTS

__all__ = ["DARK", "LIGHT", "SHEET"]

# Of the colours of phases, any two stay apart for readers with any kind of colour blindness, and each from the
# ground; tests/diagnose/test_page.py simulates it. `idle` and `other` are patterns besides.
LIGHT = {
    "ground": "#ffffff",
    "raised": "#f3f5f7",
    "ink": "#1a2027",
    "muted": "#56606b",
    "rule": "#d9dee3",
    "wait": "#d9700f",
    "copy": "#3a96dd",
    "compute": "#123c9c",
    "idle": "#75808b",
    "sync": "#a3506f",
    "hooks": "#4a2a08",
    "other": "#75808b",
}
DARK = {
    "ground": "#171b21",
    "raised": "#222831",
    "ink": "#e6eaee",
    "muted": "#a3adb8",
    "rule": "#38404a",
    "wait": "#e0661c",
    "copy": "#86dcf5",
    "compute": "#5468ee",
    "idle": "#8e99a5",
    "sync": "#a690b8",
    "hooks": "#ece884",
    "other": "#8e99a5",
}


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


_PATTERNED = ("idle", "other")

_FILLS = "\n".join(
    f".{part} {{ fill: {f'url(#{part}-pattern)' if part in _PATTERNED else f'var(--{part})'}; }}" for part in PARTS
)

SHEET = f"""
:root {{ color-scheme: light dark; {_variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}
@media print {{ :root {{ color-scheme: light; {_variables(LIGHT)} }} }}
{_FILLS}
* {{ box-sizing: border-box; }}
body {{
  margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", sans-serif;
  font-variant-numeric: tabular-nums;
}}
main {{ max-width: 1120px; margin: 0 auto; padding: 32px 24px 48px; overflow-wrap: anywhere; }}
h1 {{ margin: 0 0 12px; font-size: 15px; font-weight: 600; color: var(--muted); }}
h2 {{ margin: 0 0 10px; font-size: 18px; line-height: 1.35; font-weight: 650; }}
h3 {{ margin: 0 0 6px; font-size: 15px; font-weight: 650; }}
p {{ margin: 0 0 10px; }}
section {{ margin-top: 32px; padding-top: 20px; border-top: 1px solid var(--rule); }}
header {{ padding-left: 20px; border-left: 6px solid var(--accent, var(--wait)); }}
.verdict {{ margin: 0 0 10px; font-size: 23px; line-height: 1.4; max-width: 46em; text-wrap: pretty; }}
.verdict strong {{ font-weight: 700; }}
.muted {{ color: var(--muted); }}
.small {{ font-size: 14px; }}
.about {{ max-width: 52em; font-size: 14px; color: var(--muted); }}
header .muted {{ margin: 0; }}
.after {{ margin: 14px 0 0; }}
details {{ margin-top: 6px; font-size: 14px; color: var(--muted); }}
summary {{ cursor: pointer; }}
details p {{ margin: 6px 0 0; }}
ul {{ margin: 0; padding-left: 20px; }}
li {{ margin: 3px 0; max-width: 60em; }}
code {{
  font: 13px/1.5 ui-monospace, "Cascadia Mono", "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  padding: 1px 5px; border-radius: 4px; background: var(--raised); overflow-wrap: anywhere;
  -webkit-box-decoration-break: clone; box-decoration-break: clone;
}}
table {{ width: 100%; border-collapse: collapse; font-size: 14px; overflow-wrap: break-word; }}
th, td {{ padding: 6px 0 6px 14px; text-align: right; vertical-align: top; border-bottom: 1px solid var(--rule); }}
th:first-child, td:first-child {{ padding-left: 0; text-align: left; }}
th {{ font-weight: 600; }}
thead th {{ font-size: 13px; color: var(--muted); vertical-align: bottom; border-bottom-color: var(--muted); }}
tbody th {{ font-weight: 500; }}
tbody th .muted {{ display: block; font-size: 13px; font-weight: 400; }}
.rank {{ width: 1.4em; }}
.cures .name {{ font-weight: 650; }}
.cures .plot {{ width: 20%; }}
.words {{ text-align: left; }}
.cures .words {{ overflow-wrap: anywhere; }}
tbody th, .unit {{ white-space: nowrap; }}
td.gain {{ font-size: 16px; font-weight: 650; }}
tr.gap td {{ height: 14px; padding: 0; border: 0; }}
tr.left-out td {{ padding: 8px 0; text-align: left; color: var(--muted); }}
svg {{ display: block; }}
svg text {{ font-size: 13px; fill: var(--muted); }}
.line {{ stroke: var(--muted); stroke-width: 1; }}
.faint {{ stroke: var(--rule); stroke-width: 1; }}
.cut {{ fill: var(--ground); }}
.lane {{ fill: var(--raised); }}
.bar-cell {{ width: 34%; min-width: 110px; }}
.dot {{ fill: var(--ink); }}
.whisker {{ stroke: var(--ink); stroke-width: 2; }}
.scroll {{ overflow-x: auto; }}
.timeline {{ display: grid; grid-template-columns: 60px minmax(600px, 1fr); }}
.legend {{ display: flex; flex-wrap: wrap; gap: 4px 22px; margin: 0 0 14px; padding: 0; list-style: none; }}
.legend {{ font-size: 14px; }}
.swatch {{ display: inline-block; width: 12px; height: 12px; margin-right: 6px; vertical-align: -1px; }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(330px, 1fr)); gap: 28px 48px; }}
dl {{ display: grid; grid-template-columns: minmax(9em, auto) 1fr; margin: 0; font-size: 14px; }}
dt, dd {{ margin: 0; padding: 4px 0; border-bottom: 1px solid var(--rule); }}
dt {{ padding-right: 16px; color: var(--muted); }}
dd {{ text-align: right; }}
.file + .file {{ margin-top: 26px; }}
.file dd {{ text-align: left; }}
footer {{ margin-top: 32px; font-size: 13px; color: var(--muted); }}
@media (max-width: 900px) {{
  th, td {{ padding-left: 9px; }}
  th .swatch {{ display: block; margin: 0 0 4px auto; }}
  .cures .plot {{ display: none; }}
}}
@media (max-width: 520px) {{ main {{ padding: 20px 14px; }} .wide {{ overflow-x: auto; }} }}
@media print {{
  @page {{ margin: 14mm; }}
  main {{ max-width: none; padding: 0; }}
  body {{ font-size: 13px; print-color-adjust: exact; -webkit-print-color-adjust: exact; }}
  section {{ margin-top: 20px; padding-top: 14px; }}
  h2, h3, .about, .legend {{ break-after: avoid; }}
  tr, li, .timeline, .file, dl {{ break-inside: avoid; }}
  .timeline {{ grid-template-columns: 60px 1fr; }}
}}
"""

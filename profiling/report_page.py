"""The report of a trace as one HTML page: no network, no script, readable in the dark and on a phone."""

import html
from collections.abc import Sequence

from sparkgrpo.profiling.report import Section

STYLE = """
:root { color-scheme: light dark; --ink: #1b1d21; --paper: #fff; --line: #d9dce1; --soft: #f4f5f7; --dim: #5c636e;
  --mark: #1f5fbf; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #15171b; --line: #343a43; --soft: #1d2026;
  --dim: #9aa3af; --mark: #7db0ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.25rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.35rem; margin: 0 0 1rem; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--line); }
p { margin: .35rem 0; max-width: 62rem; }
.first { background: var(--soft); border-left: 4px solid var(--mark); padding: .5rem 1rem; margin: 0 0 1rem; }
.first h2 { border: 0; margin: 0; padding: 0; }
.table { overflow-x: auto; -webkit-overflow-scrolling: touch; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 600; }
th:first-child, td:first-child { text-align: left; padding-left: 0; position: sticky; left: 0;
  background: var(--paper); max-width: 26rem; overflow: hidden; text-overflow: ellipsis; }
.text { text-align: left; }
.unknown { color: var(--dim); font-style: italic; }
@media (max-width: 40rem) { body { padding: .8rem; font-size: 14px; }
  th:first-child, td:first-child { max-width: 9.5rem; } th, td { padding: .3rem .5rem; } }
"""


def html_page(title: str, sections: Sequence[Section]) -> str:
    """One page. All text is escaped; a content security policy forbids everything but the style above."""
    body = "\n".join(_section(section, is_first=index == 0) for index, section in enumerate(sections))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _section(section: Section, *, is_first: bool) -> str:
    parts = [f"<h2>{html.escape(section.title)}</h2>", *(f"<p>{html.escape(line)}</p>" for line in section.lines)]
    if section.rows:
        left = ' class="text"'
        head = "".join(
            f'<th scope="col"{left if i < section.num_left else ""}>{html.escape(cell)}</th>'
            for i, cell in enumerate(section.header)
        )
        rows = "\n".join(
            f"<tr>{''.join(_cell(cell, i < section.num_left) for i, cell in enumerate(row))}</tr>"
            for row in section.rows
        )
        parts.append(
            f'<div class="table" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        )
    start = '<section class="first">' if is_first else "<section>"
    return f"{start}{''.join(parts)}</section>"


def _cell(cell: str, is_text: bool) -> str:
    kind = ' class="unknown"' if cell == "cannot say" else ' class="text"' if is_text else ""
    return f'<td{kind} title="{html.escape(cell)}">{html.escape(cell)}</td>'

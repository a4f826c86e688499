"""Pages that show what the package knows: one HTML file each, which works without a network.

    page("explain", data, title)     # the text of a page: data, style and script in one
    framed(page(...))                # the same inside a notebook's cell

In: data that JSON can hold. Out: HTML. NAME.js draws the data, with common.js and common.css.
Imports the standard library alone.
"""

import html
import json
from pathlib import Path

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline';
 script-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{style}</style></head>
<body><noscript><pre>{plain}</pre></noscript>
<script type="application/json" id="data">{data}</script>
<script>{script}</script></body></html>
"""


def page(name: str, data: object, title: str, plain: str = "") -> str:
    """The text of a page. `plain`: what is shown where scripts may not run."""
    folder = Path(__file__).parent
    script = "".join((folder / f"{part}.js").read_text() for part in ("common", name))
    return _PAGE.format(
        title=html.escape(title),
        style=(folder / "common.css").read_text(),
        plain=html.escape(plain),
        data=json.dumps(data, separators=(",", ":"), default=str).replace("<", "\\u003c"),
        script=script,
    )


def framed(text: str, height: int = 480) -> str:
    """A page as part of another: its style and script stay inside."""
    return (
        f'<iframe srcdoc="{html.escape(text)}" style="width:100%;height:{height}px;border:0">'
        "</iframe>"
    )

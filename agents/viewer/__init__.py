"""The viewer: recorded runs in; one page out, which a browser shows from a file or from a server on this machine.

`source` reads a run, as far as it has come; `page` puts the page together; `export` writes it with all data inside, and
`server` serves it. What the page does is in `page/`.
"""

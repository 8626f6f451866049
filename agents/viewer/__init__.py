"""The viewer shows recorded runs in a browser, as one HTML page.

`source` reads a run while it grows, `page` assembles the page from the files in `page/`, `server` serves it, and
`export` writes it as one file with all data inside.
"""

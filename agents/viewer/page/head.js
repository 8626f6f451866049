/* The head of an episode, a group or a problem: breadcrumbs, title, links to the neighbours, key figures. */

/* facts: [[name, value, tone], ...]; false entries are left out. */
function viewHead(crumbs, title, facts, steps) {
  return make(
    "header.episode-head",
    make(".crumbs", crumbs),
    make(".title-line", make("h1", { tabindex: "-1", dir: "auto", text: title }), steps && make(".steps", steps)),
    make("dl.verdict", factBoxes(facts)),
  );
}

function factBoxes(facts) {
  return facts
    .filter(Boolean)
    .map(([name, value, tone]) =>
      make(
        "div",
        make("dt", { text: name }),
        make("dd", { text: value, dir: "auto", data: { tone: tone || "plain" } }),
      ),
    );
}

/* A link with an arrow; without a target it is only the arrow. */
function stepLink(href, text, label) {
  if (!href) return make("span.step.is-idle", { text, "aria-hidden": "true" });
  return make("a.step", { href, text, title: label, "aria-label": label });
}

/* "train", or "before · with_tool" if the phase has several ways. */
function playedFor(phase, way) {
  return visible(phase === way ? phase : `${phase} · ${way}`);
}

/* The keys that choose the colours of columns. */
function colorKeys(query, changed) {
  const keys = { v: () => changed({ color: query.color ? "" : "mask" }) };
  for (const [key, color] of Object.entries(COLORS)) keys[key] = () => changed({ color });
  return keys;
}

/* What stands above an episode, a group or a problem: where one is, a name, the way on, and what counts most. */

/* facts: [[name, value, tone], ...]; what is no fact is left out. */
function viewHead(crumbs, title, facts, steps) {
  return make(
    "header.episode-head",
    null,
    make(".crumbs", null, crumbs),
    make(
      ".title-line",
      null,
      make("h1", { tabindex: "-1", dir: "auto", text: title }),
      steps && make(".steps", null, steps),
    ),
    make("dl.verdict", null, factBoxes(facts)),
  );
}

function factBoxes(facts) {
  return facts
    .filter(Boolean)
    .map(([name, value, tone]) =>
      make(
        "div",
        null,
        make("dt", { text: name }),
        make("dd", { text: value, dir: "auto", data: { tone: tone || "plain" } }),
      ),
    );
}

/* An arrow that leads on; one that leads nowhere is idle. */
function stepLink(href, text, label) {
  if (!href) return make("span.step.is-idle", { text, "aria-hidden": "true" });
  return make("a.step", { href, text, title: label, "aria-label": label });
}

/* "train", or "before · with_tool" where a phase has ways. */
function playedFor(phase, way) {
  return visible(phase === way ? phase : `${phase} · ${way}`);
}

/* Keys that choose how tokens beside one another are coloured. */
function colorKeys(query, changed) {
  const keys = { v: () => changed({ color: query.color ? "" : "mask" }) };
  for (const [key, color] of Object.entries(COLORS)) keys[key] = () => changed({ color });
  return keys;
}

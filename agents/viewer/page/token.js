/* One token: its look, its values, and the legend of its colours. */

function tokenClass(stream, t) {
  const mine = stream.mask[t] ? " is-mine" : "";
  const relative = relativeLevel(stream.gap[t], stream.largest);
  return `t${mine} p${probabilityLevel(stream.rollout[t])} g${gapLevel(stream.gap[t])} r${relative}`;
}

/* Spaces, tabs, line breaks and invisible characters are made visible. */
function appendToken(span, text) {
  for (const part of text.slice(0, 2000).split(/([ \t\n]+)/)) {
    if (/^[ \t\n]+$/.test(part))
      span.append(make("i", { text: part.replaceAll(" ", "·").replaceAll("\t", "⇥").replaceAll("\n", "⏎") }));
    else appendVisible(span, part);
  }
  if (!text) span.append(make("i", { text: "∅" }));
  return span;
}

/* All values of a token: [head, [name, value], ...]. */
function tokenLines(stream, t) {
  const text = JSON.stringify(visible(stream.texts[t].slice(0, 120)));
  const fold = stream.folds.find((each) => each.start <= t && t < each.end);
  const chance = (logprob) =>
    Number.isFinite(logprob) ? `${figure(logprob)}  (p ${figure(Math.exp(logprob))})` : NONE;
  const lines = [
    fold ? `image, ${plural(fold.tokens, "token")}` : text,
    ["id", String(stream.ids[t])],
    ["place", count(t)],
  ];
  if (!stream.mask[t]) return [...lines, ["mask", "0, not the model's"]];
  return [
    ...lines,
    ["turn", String(stream.turn[t])],
    ["weights", `v${stream.version[t]}`],
    ["rollout log-prob", chance(stream.rollout[t])],
    ["trainer log-prob", chance(stream.train[t])],
    ["gap", Number.isFinite(stream.gap[t]) ? `${figure(stream.gap[t])} nats` : NONE],
  ];
}

function legend(state) {
  const { color } = state.query;
  const chip = (kind, level, text) =>
    make("span.legend-chip", make(`span.t.is-mine.${kind}${level}`, { text: "\u00a0\u00a0" }), text);
  if (color === "mask")
    return make(
      ".legend",
      { data: { color } },
      chip("p", 0, "written by the model"),
      make("span.legend-chip", make("span.t", { text: "\u00a0\u00a0" }), "not trained on"),
    );
  if (color === "probability")
    return make(
      ".legend",
      { data: { color } },
      [
        [0, "p ≥ 0.99"],
        [3, "0.5"],
        [5, "0.1"],
        [8, "< 0.01"],
      ].map(([level, text]) => chip("p", level, text)),
    );
  const isRelative = state.query.scale === "relative";
  const steps = isRelative
    ? [
        [8, `${figure(state.stream.largest)} nats, the largest`],
        [6, "a tenth"],
        [4, "a hundredth"],
        [2, "a thousandth"],
      ]
    : [
        [0, "< 0.001"],
        [3, "0.01"],
        [5, "0.1"],
        [7, "1"],
        [8, "≥ 3 nats"],
      ];
  const relate = () => {
    state.change({ scale: isRelative ? null : "relative" });
    state.tokens.node.classList.toggle("is-relative", !isRelative);
    state.tokens.recolor(color);
    drawTools(state);
    state.strip.draw();
  };
  const toggle = button("relative", relate, {
    "aria-pressed": String(isRelative),
    title: "colour against the largest gap of this episode",
    class: "quiet",
  });
  return make(
    `.legend${isRelative ? ".is-relative" : ""}`,
    { data: { color } },
    steps.map(([level, text]) => chip(isRelative ? "r" : "g", level, text)),
    toggle,
  );
}

/* The whole stream as one strip, in the colours of its segments and tokens; a click goes to a token. */

const STRIP = { height: 34, bar: 22 };

function streamStrip(state) {
  const { stream } = state;
  const canvas = make("canvas.strip", { role: "img", "aria-label": stripText(state), tabindex: "-1" });
  const box = make(
    ".strip-frame",
    canvas,
    make(".strip-ends", make("span", { text: "0" }), make("span", { text: `${count(stream.length)} tokens` })),
  );
  state.strip = { draw: () => drawStrip(canvas, state) };
  new ResizeObserver(state.strip.draw).observe(canvas);
  const tokenAt = (event) =>
    Math.max(0, Math.min(stream.length - 1, Math.floor((event.offsetX / canvas.clientWidth) * stream.length)));
  tipOn(canvas, (event) => stream.length && tokenLines(state.stream, tokenAt(event)));
  canvas.addEventListener("click", (event) => {
    hideTip();
    const t = tokenAt(event);
    if (state.view === "tokens") state.tokens.showToken(t, true);
    else if (stream.turn[t]) showTurn(state, stream.turn[t]);
  });
  return box;
}

function stripText({ stream, part }) {
  const model = stream.segments
    .filter((each) => each.kind === "model")
    .reduce((total, each) => total + each.end - each.start, 0);
  const turns = plural(part.turns.length, "turn");
  return `stream of ${plural(stream.length, "token")}: ${count(model)} of the model in ${turns}`;
}

function drawStrip(canvas, { stream, query }) {
  const width = canvas.clientWidth,
    scale = devicePixelRatio || 1,
    ink = paletteOf(canvas);
  if (!width) return;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(STRIP.height * scale);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const x = (t) => (t / (stream.length || 1)) * width;
  const paint = (from, to, color, top, height) => {
    pen.fillStyle = color;
    pen.fillRect(x(from), top, Math.max(1, x(to) - x(from)), height);
  };
  for (const { kind, start, end } of stream.segments) {
    paint(start, end, ink[kind], 0, STRIP.bar);
    paint(start, end, kind === "model" ? ink.accent : ink.line, STRIP.bar + 4, 3);
  }
  for (const { start, end } of stream.folds) paint(start, end, ink.image, 0, STRIP.bar);
  const color = query.color === "gap" ? "gap" : query.color === "probability" ? "chance" : null;
  const gapOf =
    query.scale === "relative" ? (t) => relativeLevel(stream.gap[t], stream.largest) : (t) => gapLevel(stream.gap[t]);
  if (color)
    paintHeat(pen, stream, color, color === "gap" ? gapOf : (t) => probabilityLevel(stream.rollout[t]), ink, x);
}

/* If several tokens share a pixel, it gets the strongest colour. */
function paintHeat(pen, stream, color, levelOf, ink, x) {
  const levels = new Map();
  for (let t = 0; t < stream.length; t += 1) {
    const level = levelOf(t);
    const at = Math.floor(x(t));
    if (level && level > ((levels.get(at) || {}).level || 0))
      levels.set(at, { level, width: Math.max(1.5, x(t + 1) - x(t)) });
  }
  pen.fillStyle = ink[color];
  for (const [at, { level, width }] of levels) {
    pen.globalAlpha = 0.15 + (0.85 * level) / 8;
    pen.fillRect(at, 0, width, STRIP.bar);
  }
  pen.globalAlpha = 1;
}

/* A canvas needs colour values: those of the style sheet for the current theme. */
function paletteOf(node) {
  const probe = node.parentNode.appendChild(make("span", { hidden: true }));
  const colorOf = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const found = {
    prompt: colorOf("strip-prompt"),
    env: colorOf("strip-env"),
    model: colorOf("strip-model"),
    image: colorOf("strip-image"),
    accent: colorOf("accent"),
    line: colorOf("line"),
    gap: colorOf("heat-gap"),
    chance: colorOf("heat-chance"),
  };
  probe.remove();
  return found;
}

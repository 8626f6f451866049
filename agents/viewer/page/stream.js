/* A token stream with all values of each token. */

const GAP_STEPS = [1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3];
const PROBABILITY_STEPS = [0.99, 0.9, 0.7, 0.5, 0.3, 0.1, 0.03, 0.01];
const PLACEHOLDER = /image|img|vision|pad|pict/i;

/* Returns {length, segments, folds, largest} and, with one value per token, {ids, mask, texts, rollout, train, gap,
   version, turn}; `part` is one of `streamsOf`. */
function readStream(run, part) {
  const { record, turns } = part,
    ids = part.number ? new Int32Array(bytesOf(record.ids).buffer) : record.ids || [],
    T = ids.length,
    mask = record.mask || maskOf(T, turns);
  const stream = {
    length: T,
    ids,
    mask,
    texts: tokenTexts(run, ids),
    rollout: spread(mask, record.logprobs),
    train: spread(mask, part.train),
    version: new Int32Array(T).fill(-1),
    turn: new Int32Array(T),
    gap: new Float64Array(T),
  };
  for (let t = 0; t < T; t += 1) stream.gap[t] = Math.abs(stream.rollout[t] - stream.train[t]);
  markTurns(stream, turns);
  stream.segments = segmentsOf(stream, turns);
  stream.folds = foldsOf(stream, part);
  stream.largest = largestGap(stream);
  return stream;
}

/* The trainer's log-probs; null if there are none, or if they belong to other tokens. */
function scoreOf(episode) {
  const { score } = episode;
  const written = recordsOf(episode).reduce((sum, { logprobs }) => sum + (logprobs || []).length, 0);
  return score && score.logprobs.length === written ? score : null;
}

function maskOf(length, turns) {
  const mask = new Uint8Array(length);
  for (const [, turn] of turns) mask.fill(1, turn.start, turn.end);
  return mask;
}

/* Spreads values over the tokens with mask 1; all others, and missing values, are NaN. */
function spread(mask, values) {
  const all = new Float64Array(mask.length).fill(NaN);
  if (!values) return all;
  for (let t = 0, n = 0; t < mask.length; t += 1)
    if (mask[t]) {
      all[t] = values[n] ?? NaN;
      n += 1;
    }
  return all;
}

function markTurns(stream, turns) {
  for (const [number, turn] of turns) {
    stream.turn.fill(number, turn.start, turn.end);
    let t = turn.start;
    for (const [version, tokens] of turn.versions || []) {
      stream.version.fill(version, t, t + tokens);
      t += tokens;
    }
  }
}

/* The prompt, the model's turns and the environment's tokens between them: [{kind, turn, start, end}]. */
function segmentsOf(stream, turns) {
  const found = [];
  let from = 0,
    before = 0;
  for (const [number, turn] of turns) {
    if (turn.start > from) found.push({ kind: before ? "env" : "prompt", turn: before, start: from, end: turn.start });
    if (turn.end > turn.start) found.push({ kind: "model", turn: number, start: turn.start, end: turn.end });
    from = Math.max(from, turn.end);
    before = number;
  }
  if (from < stream.length)
    found.push({ kind: found.length ? "env" : "prompt", turn: before, start: from, end: stream.length });
  return found;
}

/* The text of each token. A token that is only part of a character shows its bytes; the last part, the character. */
function tokenTexts(run, ids) {
  const texts = new Array(ids.length);
  let decoder = null;
  for (let t = 0; t < ids.length; t += 1) {
    const bytes = run.tokenBytes.get(ids[t]);
    if (!bytes) {
      decoder = null;
      texts[t] = run.tokens.get(ids[t]) ?? `#${ids[t]}`;
      continue;
    }
    decoder ||= new TextDecoder("utf-8", { ignoreBOM: true });
    const ends = !run.tokenBytes.has(ids[t + 1]);
    const text = decoder.decode(bytes, { stream: !ends });
    texts[t] = text || `‹${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join(" ")}›`;
    if (ends) decoder = null;
  }
  return texts;
}

/* The positions of images: [{start, end, tokens, name}]. The placeholder is the token id that occurs as often as all
   images have tokens. */
function foldsOf(stream, part) {
  const sizes = (part.record.images || []).map((image) => image.num_tokens);
  const total = sizes.reduce((a, b) => a + b, 0);
  if (!total) return [];
  const counts = new Map();
  for (let t = 0; t < stream.length; t += 1)
    if (!stream.mask[t]) counts.set(stream.ids[t], (counts.get(stream.ids[t]) || 0) + 1);
  const fitting = [...counts].filter(([, times]) => times === total).map(([id]) => id);
  const named = fitting.find((id) => PLACEHOLDER.test(stream.texts[stream.ids.indexOf(id)]));
  const id = named ?? (fitting.length === 1 && total > 3 ? fitting[0] : undefined);
  return id === undefined ? [] : foldRuns(stream, part, id, sizes);
}

function foldRuns(stream, part, id, sizes) {
  const names = imagesIn(part.messages),
    folds = [];
  let t = 0;
  sizes.forEach((tokens, k) => {
    let start = -1;
    for (let seen = 0; seen < tokens && t < stream.length; t += 1) {
      if (stream.ids[t] !== id || stream.mask[t]) continue;
      if (start < 0) start = t;
      seen += 1;
    }
    if (start >= 0) folds.push({ start, end: t, tokens, name: names[k] || `images/${part.record.images[k].digest}.png` });
  });
  return folds;
}

/* The strength of a token's colour, 0 to 8. */
function gapLevel(gap) {
  return Number.isFinite(gap) ? GAP_STEPS.filter((step) => gap >= step).length : 0;
}

function probabilityLevel(logprob) {
  return Number.isFinite(logprob) ? PROBABILITY_STEPS.filter((step) => Math.exp(logprob) < step).length : 0;
}

/* The same, relative to the largest gap of the episode; a level is half an order of magnitude. */
function relativeLevel(gap, largest) {
  if (!(gap > 0) || !(largest > 0)) return 0;
  return Math.max(0, Math.min(8, Math.ceil(8 + 2 * Math.log10(gap / largest))));
}

function largestGap(stream) {
  let most = 0;
  for (const gap of stream.gap) if (gap > most) most = gap;
  return most;
}

/* The n tokens with the largest gaps or, if `of` is "probability", the n least probable ones below 0.99. */
function mostNotable(stream, n, of) {
  const worth = of === "probability" ? (t) => -stream.rollout[t] : (t) => stream.gap[t];
  const least = of === "probability" ? -Math.log(PROBABILITY_STEPS[0]) : 0;
  const places = [];
  for (let t = 0; t < stream.length; t += 1) if (worth(t) > least) places.push(t);
  return places.sort((a, b) => worth(b) - worth(a)).slice(0, n);
}

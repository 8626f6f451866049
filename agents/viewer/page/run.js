/* One run in the page: the columns of all episodes, with look-ups by id and by group. */

/* Makes a run from its first overview. */
function makeRun(number, overview) {
  const run = { number };
  resetRun(run);
  applyOverview(run, overview);
  return run;
}

function resetRun(run) {
  Object.assign(run, {
    metrics: [],
    columns: {},
    size: 0,
    byId: new Map(),
    groups: new Map(),
    haystacks: [],
    tokens: new Map(),
    tokenBytes: new Map(),
  });
}

/* Adds the new data of an overview; returns whether there were any. */
function applyOverview(run, overview) {
  const first = overview.first || 0,
    ids = (overview.columns || {}).id || [],
    rows = overview.metrics || [];
  if (!first && run.size) resetRun(run);
  const { name, env, manifest, registry, folder, summary, cursor, live } = overview;
  const isNew = ids.length > 0 || rows.length > 0 || live !== run.live || Boolean(summary) !== Boolean(run.summary);
  Object.assign(run, {
    name: name || `run ${run.number}`,
    env: env || "",
    manifest: manifest || {},
    registry: registry || "",
    folder: folder || "",
    summary,
    cursor,
    live,
  });
  run.metrics = [...run.metrics.slice(0, overview.first_metric || 0), ...rows];
  applyColumns(run, overview.columns || {}, first, ids.length);
  for (const [id, text] of Object.entries(overview.tokens || {})) run.tokens.set(Number(id), text);
  for (const [id, digits] of Object.entries(overview.token_hex || {})) run.tokenBytes.set(Number(id), hexBytes(digits));
  return applyUpdates(run, overview.updates || {}) || isNew;
}

function applyColumns(run, columns, first, size) {
  for (const [name, values] of Object.entries(columns)) {
    const column = (run.columns[name] ||= []);
    for (let i = 0; i < values.length; i += 1) column[first + i] = values[i];
  }
  for (let place = first; place < first + size; place += 1) indexEpisode(run, place);
  run.size = Math.max(run.size, first + size);
}

/* Sets values of earlier episodes that were recorded later. */
function applyUpdates(run, updates) {
  let isNew = false;
  for (const [name, values] of Object.entries(updates)) {
    for (const [place, value] of Object.entries(values)) {
      (run.columns[name] ||= [])[Number(place)] = value;
      run.haystacks[Number(place)] = undefined;
      isNew = true;
    }
  }
  return isNew;
}

function indexEpisode(run, place) {
  const { id } = run.columns;
  run.byId.set(encoded(id[place]), place);
  run.haystacks[place] = undefined;
  const key = groupKey(run, place);
  const group = run.groups.get(key);
  if (group) group.push(place);
  else run.groups.set(key, [place]);
}

function groupKey(run, place) {
  const { phase, way, group } = run.columns;
  return `${encoded(phase[place])}/${encoded(way[place])}/${group[place]}`;
}

/* The episodes of a group in order: the last attempt first, each attempt by sample. */
function groupOf(run, phase, way, group) {
  const { sample_index: sample, attempt } = run.columns;
  const found = run.groups.get(`${encoded(phase)}/${encoded(way)}/${group}`) || [];
  return [...found].sort((a, b) => attempt[b] - attempt[a] || sample[a] - sample[b]);
}

function hexBytes(digits) {
  return Uint8Array.from(digits.match(/../g) || [], (pair) => parseInt(pair, 16));
}

/* The text that a search looks through. */
function haystack(run, place) {
  const { id, question, answer, label, sample_id: sample } = run.columns;
  return (run.haystacks[place] ||= [id, sample, label, question, answer]
    .map((column) => column[place] ?? "")
    .join("\n")
    .toLowerCase());
}

function modelName(run) {
  const path = run.manifest.model || "";
  const parts = path.split("/").filter(Boolean);
  return parts.slice(/^[~/.]/.test(path) ? -2 : 0).join("/");
}

/* Distinct values of a column, most frequent first: [[value, count], ...]. */
function tally(run, name, places) {
  const counts = new Map();
  const column = run.columns[name];
  for (const place of places || column.keys()) counts.set(column[place], (counts.get(column[place]) || 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}
